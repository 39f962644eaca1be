#!/usr/bin/env bash
# All checks that need no build. Reports every failing one, not just the first.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
export PATH="$VENV/bin:$PATH"

tracked() { git ls-files -z --cached --others --exclude-standard -- "$@"; }

status=0
check() {
  local title="$1"
  shift
  printf '%-18s' "$title"
  local output
  if output="$("$@" 2>&1)"; then
    echo ok
  else
    echo FAILED
    printf '%s\n' "$output"
    status=1
  fi
}

cpp_format() { tracked '*.h' '*.cpp' | xargs -0 -r clang-format --dry-run -Werror; }
cmake_format() {
  tracked '*CMakeLists.txt' '*.cmake' ':!cmake/sources.cmake' | xargs -0 -r gersemi --check --no-warn-about-unknown-commands
}
spelling() { tracked ':!LICENSE' ':!tests/fuzz/corpus' | xargs -0 -r codespell; }

check clang-format cpp_format
check gersemi cmake_format
check "ruff check" ruff check .
check "ruff format" ruff format --check .
if [ -n "$(tracked 'python/kvprism/*.py')" ]; then
  check mypy mypy
fi
check codespell spelling
check rooms python scripts/check_rooms.py
check "source list" python scripts/freeze_sources.py --check
exit "$status"
