#!/usr/bin/env bash
# Runs the C++ tests, then the Python tests. Arguments go to pytest.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
export MC_FORCE_TCP=1 MC_TCP_BIND_ADDRESS=127.0.0.1

status=0
say "C++ tests"
ctest --test-dir "$BUILD" --output-on-failure --parallel "$JOBS" --progress || status=$?

say "Python tests"
code=0
"$VENV/bin/python" -m pytest "$@" || code=$?
if [ "$code" != 0 ] && [ "$code" != 5 ]; then
  status=$code
fi
exit "$status"
