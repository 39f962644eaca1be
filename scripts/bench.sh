#!/usr/bin/env bash
# Builds the C++ benchmarks and runs them, beside a real Mooncake on loopback; the figures go to
# build/bench/results.json. Arguments go to the program.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

say "Building build/bench"
mkdir -p build/bench
cmake --preset bench >build/bench/configure.log 2>&1 || {
  cat build/bench/configure.log
  exit 1
}
cmake --build --preset bench --parallel "$JOBS"

say "core_bench: each part beside its floor, in one run; no pass marks"
commit="$(git describe --always --dirty 2>/dev/null || echo unknown)"
PATH="$VENV/bin:$PATH" "$VENV/bin/python" scripts/bench.py build/bench/bin/core_bench \
  --json build/bench/results.json --commit "$commit" "$@"
echo "figures: build/bench/results.json"
