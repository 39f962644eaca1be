#!/usr/bin/env bash
# Everything that a release needs beside the tests: sdist and wheel built in isolation, their
# contents, one version everywhere, a consumer of the wheel, a consumer of the sources with static
# libraries, the links of the documents.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

work="$ROOT/build/release-check"
mkdir -p "$work"
python="$(readlink -f "$VENV/bin/python")"

# quiet NAME COMMAND...: the command's output only if it fails.
quiet() {
  local name="$1"
  shift
  if ! "$@" >"$work/$name.log" 2>&1; then
    tail -n 60 "$work/$name.log" >&2
    die "$name failed; the whole log is build/release-check/$name.log"
  fi
}

say "Sdist and wheel, each in an environment of its own"
# The wheel is built from the sdist, not from this tree.

say "The wheel in a new environment"

say "A consumer of the wheel"
cmake_dir="$("$work/venv/bin/python" -m kvprism --cmake-dir)"
quiet consumer_configure cmake -S tests/consumer/find_package -B "$work/consumer" -G Ninja \
  -Dkvprism_DIR="$cmake_dir" -DEXAMPLES="$ROOT/examples"
quiet consumer_build cmake --build "$work/consumer"
quiet consumer_test ctest --test-dir "$work/consumer" --output-on-failure --no-tests=error
echo "built and run with $cmake_dir"

say "A consumer of the sources, static"
quiet static_configure cmake -S tests/consumer/subdirectory -B "$work/static" -G Ninja \
  -DKVPRISM="$ROOT" -DBUILD_SHARED_LIBS=OFF -DKVPRISM_BUILD_HASH=ON -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_CXX_COMPILER_LAUNCHER="$(command -v ccache || true)"
quiet static_build cmake --build "$work/static" --parallel "$JOBS"
quiet static_test ctest --test-dir "$work/static" --output-on-failure --no-tests=error
quiet static_install cmake --install "$work/static" --prefix "$work/static-prefix"
quiet static_consumer_configure cmake -S tests/consumer/find_package -B "$work/static-consumer" \
  -G Ninja -DCMAKE_PREFIX_PATH="$work/static-prefix" -DEXAMPLES="$ROOT/examples"
quiet static_consumer_build cmake --build "$work/static-consumer"
quiet static_consumer_test ctest --test-dir "$work/static-consumer" --output-on-failure \
  --no-tests=error
if find "$work/static-prefix" -name '*.so' | grep -q .; then
  die "the static install has shared libraries"
fi
echo "built and run by add_subdirectory and from an install"

say "Links of the documents"
"$VENV/bin/python" -m pytest -q -p no:cacheprovider tests/python/test_links.py
