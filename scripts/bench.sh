#!/usr/bin/env bash
# Runs the C++ benchmarks of build/release, beside a real Mooncake on loopback; the figures go to
# build/bench/results.json. Arguments go to the program.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

mkdir -p build/bench
say "core_bench: each part beside its floor, in one run; no pass marks"
commit="$(git describe --always --dirty 2>/dev/null || echo unknown)"
PATH="$VENV/bin:$PATH" "$VENV/bin/python" scripts/bench.py build/release/bin/core_bench \
  --json build/bench/results.json --commit "$commit" "$@"
echo "figures: build/bench/results.json"
