#!/usr/bin/env bash
# Everything that a release needs beside the tests: sdist and wheel built in isolation, their
# contents, one version everywhere, a consumer of the wheel, a consumer of the sources with static
# libraries, the links of the documents.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

work="$ROOT/build/release-check"
rm -rf "$work"
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

say "Sdist, and a wheel of what is in it"
"$python" -m venv "$work/builder"
quiet builder "$work/builder/bin/pip" --disable-pip-version-check install -r scripts/requirements-release.txt
quiet sdist "$work/builder/bin/python" -m build --sdist --outdir "$work/dist" .
# Two folders down, as the build trees of this one: the compiler's cache then knows the sources,
# if the flags are the same.
mkdir "$work/sdist"
tar -xzf "$work"/dist/*.tar.gz -C "$work/sdist" --strip-components=1
CMAKE_BUILD_PARALLEL_LEVEL="$JOBS" quiet wheel "$work/builder/bin/pip" --disable-pip-version-check \
  wheel --no-deps -w "$work/dist" -Ccmake.define.KVPRISM_WERROR="${KVPRISM_WERROR:-OFF}" "$work/sdist"
"$VENV/bin/python" scripts/check_wheel.py "$work"/dist/*.whl

say "The wheel in a new environment"
"$python" -m venv "$work/venv"
quiet install "$work/venv/bin/pip" --disable-pip-version-check install "$work"/dist/*.whl cmake ninja \
  scikit-build-core
"$work/venv/bin/python" scripts/release_check.py "$work" "$work"/dist/*.tar.gz "$work"/dist/*.whl

say "Consumers of the wheel"
cmake_dir="$("$work/venv/bin/python" -m kvprism --cmake-dir)"
quiet consumer_configure cmake -S tests/consumer/find_package -B "$work/consumer" -G Ninja \
  -Dkvprism_DIR="$cmake_dir" -DEXAMPLES="$ROOT/examples"
quiet consumer_build cmake --build "$work/consumer"
quiet consumer_test ctest --test-dir "$work/consumer" --output-on-failure --no-tests=error
# A Python package with C++ of its own finds it by the entry point `cmake.prefix`.
quiet extension "$work/venv/bin/pip" --disable-pip-version-check install --no-deps --no-build-isolation \
  tests/consumer/python_package
quiet extension_test "$work/venv/bin/consumer-of-kvprism"
echo "built and run with $cmake_dir, and by a Python package"

say "A consumer of the sources, static"
static="$ROOT/build/release-check-static"
rm -rf "$static"
quiet static_configure cmake -S tests/consumer/subdirectory -B "$static" -G Ninja \
  -DKVPRISM="$ROOT" -DBUILD_SHARED_LIBS=OFF -DKVPRISM_BUILD_HASH=ON -DKVPRISM_INSTALL=ON \
  -DCMAKE_BUILD_TYPE=Release -DKVPRISM_WERROR="${KVPRISM_WERROR:-OFF}" \
  -DCMAKE_CXX_COMPILER_LAUNCHER="$(command -v ccache || true)"
quiet static_build cmake --build "$static" --parallel "$JOBS"
quiet static_test ctest --test-dir "$static" --output-on-failure --no-tests=error
quiet static_install cmake --install "$static" --prefix "$work/static-prefix"
quiet static_consumer_configure cmake -S tests/consumer/find_package -B "$work/static-consumer" \
  -G Ninja -DCMAKE_PREFIX_PATH="$work/static-prefix" -DEXAMPLES="$ROOT/examples"
quiet static_consumer_build cmake --build "$work/static-consumer"
quiet static_consumer_test ctest --test-dir "$work/static-consumer" --output-on-failure \
  --no-tests=error
if find "$work/static-prefix" -name '*.so' | grep -q .; then
  die "the static install has shared libraries"
fi
# The core's archive asks for no OpenSSL; the one of hash says what it needs.
without=(-G Ninja -DCMAKE_PREFIX_PATH="$work/static-prefix" -DCMAKE_DISABLE_FIND_PACKAGE_OpenSSL=ON)
quiet static_core cmake -S tests/consumer/component -B "$work/static-core" "${without[@]}"
if cmake -S tests/consumer/component -B "$work/static-hash" -DCOMPONENT=hash "${without[@]}" \
  >"$work/static_hash.log" 2>&1 ||
  ! grep -q "component hash: its archive needs OpenSSL's Crypto" "$work/static_hash.log"; then
  cat "$work/static_hash.log" >&2
  die "the archive of hash did not say that it needs OpenSSL"
fi
echo "built and run by add_subdirectory and from an install"

say "Links of the documents"
"$VENV/bin/python" -m pytest -q -p no:cacheprovider tests/python/test_links.py
