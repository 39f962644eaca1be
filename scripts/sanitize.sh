#!/usr/bin/env bash
# sanitize.sh asan|tsan: builds the C++ tests with the sanitizer and runs them, without Mooncake.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
preset="$1"
need_packages g++ cmake ninja-build libfmt-dev nlohmann-json3-dev libxxhash-dev libssl-dev libgtest-dev \
  libgmock-dev

mkdir -p build
say "Building build/$preset"
cmake --preset "$preset" >"build/$preset.log" 2>&1 || { cat "build/$preset.log"; exit 1; }
cmake --build --preset "$preset" --parallel "$JOBS"

say "C++ tests with $preset"
launch=()
# Older ThreadSanitizers do not start under high-entropy address randomisation.
if [ "$preset" = tsan ] && setarch "$(uname -m)" -R true 2>/dev/null; then
  launch=(setarch "$(uname -m)" -R)
fi
"${launch[@]}" ctest --preset "$preset" --parallel "$JOBS" --progress
