#!/usr/bin/env bash
# Builds and runs the C++ benchmarks; one JSON file each below build/bench/results.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
need_packages g++ cmake ninja-build ccache libfmt-dev nlohmann-json3-dev libxxhash-dev libssl-dev \
  libbenchmark-dev

mkdir -p build/bench/results
say "Building build/bench"
cmake --preset bench >build/bench.log 2>&1 || { cat build/bench.log; exit 1; }
cmake --build --preset bench --parallel "$JOBS"

shopt -s nullglob
for program in build/bench/bin/*; do
  name="$(basename "$program")"
  say "$name"
  "$program" --benchmark_out="build/bench/results/$name.json" --benchmark_out_format=json "$@"
done
