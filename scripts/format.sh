#!/usr/bin/env bash
# format.sh [FILE...]: rewrites C++, CMake and Python sources, all or those named, into the
# project's format.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
export PATH="$VENV/bin:$PATH"

list() {
  if [ "${#files[@]}" = 0 ]; then
    tracked '*'
  else
    printf '%s\0' "${files[@]}"
  fi
}

files=("$@")
list | only '\.(h|c|cpp)$' | xargs -0 -r clang-format -i
list | only '(CMakeLists\.txt|\.cmake)$' | xargs -0 -r gersemi --in-place
list | only '\.py$' | xargs -0 -r ruff check --quiet --fix
list | only '\.py$' | xargs -0 -r ruff format --quiet
