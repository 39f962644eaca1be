#!/usr/bin/env bash
# Prepares everything `make demo` and `make test` need: system packages (as root), .venv, and an
# editable install whose build tree, build/release, also holds the C++ tests. Quick when repeated.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

build_packages=(g++ cmake ninja-build make ccache libfmt-dev nlohmann-json3-dev libxxhash-dev
  libgtest-dev libgmock-dev libbenchmark-dev)
run_packages=(libibverbs1 libnuma1 libcurl4 iproute2 valgrind)

# A Python of at least 3.11 with venv and headers; prints its path.
find_python() {
  local candidate path
  for candidate in python3.14 python3.13 python3.12 python3.11 python3 /usr/bin/python3; do
    path="$("$candidate" - 2>/dev/null <<'PY'
import ensurepip, os, sys, sysconfig, venv
header = os.path.join(sysconfig.get_path("include"), "Python.h")
print(sys.executable if sys.version_info >= (3, 11) and os.path.exists(header) else "")
PY
    )" || continue
    if [ -n "$path" ]; then
      printf '%s\n' "$path"
      return 0
    fi
  done
  return 1
}

# Fits the wheels that the requirements pin: try the newest first, but not one they lack.
need_packages "${build_packages[@]}" "${run_packages[@]}"
if ! python="$(find_python)"; then
  need_packages python3-dev python3-venv
  python="$(find_python)" || die "no Python >= 3.11 with headers and venv found"
fi

inputs=(scripts/setup.sh scripts/common.sh scripts/requirements-build.txt
  scripts/requirements-test.txt scripts/requirements-lint.txt pyproject.toml)
stamp="$VENV/.kvprism-setup"
want="$(
  {
    printf '%s\n' "$ROOT" "$python"
    "$python" -V
    grep -n 'VERSION [0-9]' CMakeLists.txt
    sha256sum "${inputs[@]}"
  } | sha256sum
)"
if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && [ -f "$BUILD/build.ninja" ]; then
  exit 0
fi

if ! "$VENV/bin/python" -c 'import sys' 2>/dev/null ||
  [ "$(cat "$VENV/.kvprism-python" 2>/dev/null)" != "$ROOT $python" ]; then
  say "Creating .venv with $("$python" -V)"
  "$python" -m venv --clear "$VENV"
  printf '%s\n' "$ROOT $python" >"$VENV/.kvprism-python"
fi

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

say "Installing Python packages"
pip install -q -r scripts/requirements-build.txt -r scripts/requirements-test.txt \
  -r scripts/requirements-lint.txt

say "Building kvprism in build/release"
CMAKE_BUILD_PARALLEL_LEVEL="$JOBS" pip install -v --no-deps --no-build-isolation \
  -Cbuild-dir=build/release \
  -Ccmake.define.KVPRISM_BUILD_TESTS=ON \
  -Ccmake.define.KVPRISM_WERROR="${KVPRISM_WERROR:-OFF}" \
  -e . 2>&1 | tee "$VENV/install.log" | grep --line-buffered -E '^ *(\[[0-9]+/[0-9]+\]|.*(error|Error|warning):|FAILED)' ||
  true
if ! grep -q '^Successfully installed kvprism' <(sed 's/^ *//' "$VENV/install.log"); then
  tail -n 60 "$VENV/install.log" >&2
  die "the build failed; its log is .venv/install.log"
fi

printf '%s\n' "$want" >"$stamp"
