#!/usr/bin/env bash
# build.sh [TARGET]: brings build/release and the editable install up to date with the sources.
# Without a target the tests too; what is installed is kvprism_package.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
lock_build

site="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"
cmake --build "$BUILD" --parallel "$JOBS" --target "${1:-all}"
cmake --install "$BUILD" --prefix "$site" >/dev/null
