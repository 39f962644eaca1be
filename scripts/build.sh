#!/usr/bin/env bash
# Brings build/release and the editable install up to date with the sources.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
lock_build

site="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"
cmake --build "$BUILD" --parallel "$JOBS"
cmake --install "$BUILD" --prefix "$site" >/dev/null
