#!/usr/bin/env bash
# fuzz.sh [SECONDS]: runs all fuzz targets side by side for so long, each from its corpus.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
seconds="${1:-60}"
need_packages cmake ninja-build ccache libstdc++-12-dev libfmt-dev nlohmann-json3-dev libxxhash-dev libssl-dev \
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
mkdir -p fuzz-artifacts
fuzz() { # all targets at once, each for the whole time
  local name seeds=() directory
  name="$(basename "$1")"
  mkdir -p "build/fuzz/corpus/$name"
  for directory in "tests/fuzz/corpus/$name" "tests/fuzz/corpus/${name#fuzz_}"; do
    if [ -d "$directory" ]; then
      seeds+=("$directory")
    fi
  done
  "$1" -max_total_time="$seconds" -print_final_stats=1 -artifact_prefix="fuzz-artifacts/$name-" \
    -rss_limit_mb=2048 -timeout=10 "build/fuzz/corpus/$name" "${seeds[@]}" >"build/fuzz/$name.log" 2>&1
}

say "$seconds s: ${targets[*]##*/}"
jobs=()
for target in "${targets[@]}"; do
  fuzz "$target" &
  jobs+=($!)
done
status=0
results=()
for at in "${!targets[@]}"; do
  name="$(basename "${targets[$at]}")"
  code=0
  wait "${jobs[$at]}" || code=$?
  printf '%s: exit status %s\n' "$name" "$code"
  executions="$(sed -n 's/^stat::number_of_executed_units: *//p' "build/fuzz/$name.log")"
  results+=("  {\"target\": \"$name\", \"executions\": ${executions:-0}, \"status\": $code}")
  if [ "$code" = 0 ]; then
    grep -E '^(Done|stat::number_of_executed_units)' "build/fuzz/$name.log"
  else
    tail -n 60 "build/fuzz/$name.log"
    status=1
  fi
done
mkdir -p build/runs
{
  printf '{\n "date": "%s",\n "version": "%s",\n "seconds": %s,\n "targets": [\n' "$(date +%F)" \
    "$(sed -n 's/^ *VERSION \([0-9.]*\)$/\1/p' CMakeLists.txt | head -n 1)" "$seconds"
  printf '%s\n' "${results[@]}" | sed '$!s/$/,/'
  printf ' ]\n}\n'
} >build/runs/fuzz.json
exit "$status"
