#!/usr/bin/env bash
# Rewrites C++, CMake and Python sources into the project's format.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
export PATH="$VENV/bin:$PATH"
tracked() { git ls-files -z --cached --others --exclude-standard -- "$@"; }

tracked '*.h' '*.cpp' | xargs -0 -r clang-format -i
tracked '*CMakeLists.txt' '*.cmake' ':!cmake/sources.cmake' | xargs -0 -r gersemi --in-place --no-warn-about-unknown-commands
ruff format .
ruff check --fix .
