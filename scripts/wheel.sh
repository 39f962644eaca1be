#!/usr/bin/env bash
# Builds a wheel into dist/ and checks what is in it.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

say "Building the wheel"
rm -rf dist
"$VENV/bin/python" -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation \
  -w dist .
"$VENV/bin/python" scripts/check_wheel.py dist/*.whl
