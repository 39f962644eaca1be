#!/usr/bin/env bash
# Prepares everything `make demo` and `make test` need: system packages (as root), .venv, and an
# editable install. Its build tree, build/release, is ready for the C++ tests, which build.sh builds.
# Quick when repeated. With --tools it stops before the build.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

packages=(g++ cmake ninja-build make libfmt-dev nlohmann-json3-dev libxxhash-dev libssl-dev libgtest-dev
  libgmock-dev libibverbs1 libnuma1 libcurl4 iproute2 valgrind)
if [ "$(id -u)" = 0 ]; then
  packages+=(ccache) # only a convenience
fi

# Prints the newest Python in PATH, or what KVPRISM_PYTHON names, that has venv and headers and a
# wheel of the pinned Mooncake; never one of a venv.
find_python() {
  local candidate path
  for candidate in ${KVPRISM_PYTHON:-python3.13 python3.12 python3.11 python3 /usr/bin/python3}; do
    path="$("$candidate" - 2>/dev/null <<'PY'
import ensurepip, os, sys, sysconfig, venv
header = os.path.join(sysconfig.get_path("include"), "Python.h")
if (3, 11) <= sys.version_info[:2] <= (3, 13) and os.path.exists(header):
    print(getattr(sys, "_base_executable", sys.executable))
PY
    )" || continue
    if [ -n "$path" ]; then
      printf '%s\n' "$path"
      return 0
    fi
  done
  return 1
}

need_packages "${packages[@]}"
if ! python="$(find_python)"; then
  if [ -n "${KVPRISM_PYTHON:-}" ]; then
    die "KVPRISM_PYTHON=$KVPRISM_PYTHON is no Python 3.11 to 3.13 with headers and venv"
  fi
  need_packages python3-dev python3-venv
  python="$(find_python)" || die "no Python 3.11 to 3.13 with headers and venv found"
fi

lock_build
requirements=(scripts/requirements-build.txt scripts/requirements-test.txt
  scripts/requirements-lint.txt)
inputs="$(
  {
    printf '%s\n' "$ROOT" "$python"
    "$python" -V
    sha256sum scripts/setup.sh "${requirements[@]}"
  } | sha256sum
)"
tools_stamp="$VENV/.kvprism-tools"
build_inputs="$(
  {
    printf '%s\n' "$inputs" "${KVPRISM_WERROR:-OFF}"
    grep 'VERSION [0-9]' CMakeLists.txt
    sha256sum pyproject.toml
  } | sha256sum
)"
build_stamp="$VENV/.kvprism-build"

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

if [ "$(cat "$tools_stamp" 2>/dev/null)" != "$inputs" ]; then
  identity="$ROOT $python $("$python" -V)"
  if [ "$(cat "$VENV/.kvprism-python" 2>/dev/null)" != "$identity" ]; then
    say "Creating .venv with $("$python" -V)"
    rm -rf "$VENV" "$BUILD"
    "$python" -m venv "$VENV"
    printf '%s\n' "$identity" >"$VENV/.kvprism-python"
  fi
  say "Installing Python packages"
  rm -f "$tools_stamp" # until it has worked
  pip install -q "${requirements[@]/#/-r}" 2> >(grep -v '^WARNING: Location' >&2)
  printf '%s\n' "$inputs" >"$tools_stamp"
fi
if [ "${1:-}" = --tools ]; then
  exit 0
fi
if [ "$(cat "$build_stamp" 2>/dev/null)" = "$build_inputs" ] && [ -f "$BUILD/build.ninja" ]; then
  exit 0
fi

say "Building kvprism in build/release"
rm -f "$build_stamp" # until it has worked
# The build asks installed packages for CMake files; an older kvprism could not even be imported
# beside newer sources.
pip uninstall -q -y kvprism 2>/dev/null || true
log="$VENV/install.log"
if ! CMAKE_BUILD_PARALLEL_LEVEL="$JOBS" pip install -v --no-deps --no-build-isolation \
  -Cbuild-dir=build/release -Cbuild.targets=kvprism_package \
  -Ccmake.define.KVPRISM_BUILD_TESTS=ON \
  -Ccmake.define.KVPRISM_BUILD_BENCHMARKS=ON \
  -Ccmake.define.KVPRISM_WERROR="${KVPRISM_WERROR:-OFF}" \
  -e . 2>&1 | tee "$log" | sed -n -u -E 's/^ *(\[[0-9]+\/[0-9]+\] .*)/\1/p'; then
  if grep -q 'FAILED: ' "$log"; then
    sed -n '/FAILED: /,/ninja: build stopped/p' "$log" | head -n 60 >&2
  else
    tail -n 40 "$log" >&2
  fi
  die "the build failed; the whole log is .venv/install.log"
fi

printf '%s\n' "$build_inputs" >"$build_stamp"
