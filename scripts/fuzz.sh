#!/usr/bin/env bash
# fuzz.sh [SECONDS]: runs every fuzz target for its share of the time, starting from its corpus.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
seconds="${1:-60}"
need_packages cmake ninja-build ccache libstdc++-12-dev libfmt-dev nlohmann-json3-dev libxxhash-dev \
  clang-19 libclang-rt-19-dev

mkdir -p build
say "Building build/fuzz"
cmake --preset fuzz >build/fuzz.log 2>&1 || { cat build/fuzz.log; exit 1; }
cmake --build --preset fuzz --parallel "$JOBS"

shopt -s nullglob
targets=(build/fuzz/bin/*)
if [ "${#targets[@]}" = 0 ]; then
  echo "no fuzz targets"
  exit 0
fi
share=$(((seconds + ${#targets[@]} - 1) / ${#targets[@]}))
mkdir -p fuzz-artifacts
for target in "${targets[@]}"; do
  name="$(basename "$target")"
  say "$name, $share s"
  mkdir -p "build/fuzz/corpus/$name"
  seeds=()
  for directory in "tests/fuzz/corpus/$name" "tests/fuzz/corpus/${name#fuzz_}"; do
    if [ -d "$directory" ]; then
      seeds+=("$directory")
    fi
  done
  "$target" -max_total_time="$share" -print_final_stats=1 -artifact_prefix="fuzz-artifacts/$name-" \
    -rss_limit_mb=2048 -timeout=10 "build/fuzz/corpus/$name" "${seeds[@]}" 2>&1 |
    grep -v -E '^#[0-9]+\s+(NEW|REDUCE|RELOAD)'
done
