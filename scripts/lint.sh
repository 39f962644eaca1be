#!/usr/bin/env bash
# All checks that need no build. Reports every failing one, not just the first.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
export PATH="$VENV/bin:$PATH"

status=0
check() {
  local title="$1" output
  shift
  printf '%-14s' "$title"
  if output="$("$@" 2>&1)"; then
    echo ok
  else
    echo FAILED
    printf '%s\n' "$output"
    status=1
  fi
}

cpp_format() {
  tracked '*' | only '\.(h|c|cpp)$' | xargs -0 -r clang-format --dry-run -Werror --ferror-limit=5
}
cmake_format() { tracked '*' | only '(CMakeLists\.txt|\.cmake)$' | xargs -0 -r gersemi --check; }
spelling() { tracked '*' | xargs -0 -r codespell; }
types() { compgen -G 'python/kvprism/*.py' >/dev/null || return 0; mypy; }

check clang-format cpp_format
check gersemi cmake_format
check ruff ruff check --quiet .
check "ruff format" ruff format --check --quiet .
check mypy types
check codespell spelling
check rooms python scripts/check_rooms.py
check sources python scripts/freeze_sources.py --check
exit "$status"
