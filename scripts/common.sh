# Sourced by the other scripts: paths, messages, the check for system packages, lists of files.
unset CDPATH # with it `cd` may go elsewhere, and says where
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
BUILD="$ROOT/build/release"
JOBS="$(nproc 2>/dev/null || echo 2)"
APT_WAIT_SECONDS=600
export ROOT VENV BUILD JOBS
# What one build tree has compiled, ccache knows in the others, also of a wheel.
export CCACHE_BASEDIR="$ROOT" CCACHE_NOHASHDIR=1

say() { printf '\n== %s\n' "$*"; }

die() {
  printf 'kvprism: %s\n' "$*" >&2
  exit 2
}

# One build at a time in build/release; held until the script ends.
lock_build() {
  mkdir -p "$ROOT/build"
  exec 9>"$ROOT/build/.lock"
  flock 9
}

has_library() { /sbin/ldconfig -p 2>/dev/null | grep -q "[[:space:]]$1 "; }

# has_package NAME: is the Debian package, or what we want from it, present?
has_package() {
  case "$1" in
    g++ | cmake | make | ccache | valgrind) command -v "$1" >/dev/null && return 0 ;;
    ninja-build) command -v ninja >/dev/null && return 0 ;;
    clang-19) command -v clang++-19 >/dev/null && return 0 ;;
    iproute2) command -v ip >/dev/null && return 0 ;;
    libibverbs1) has_library libibverbs.so.1 && return 0 ;;
    libnuma1) has_library libnuma.so.1 && return 0 ;;
    libcurl4) has_library libcurl.so.4 && return 0 ;;
  esac
  if ! command -v dpkg-query >/dev/null; then
    return 0 # not a Debian: CMake will say what is missing
  fi
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# need_packages NAME...: installs what is missing, or names it and ends with status 2.
need_packages() {
  local name log
  local missing=()
  for name in "$@"; do
    has_package "$name" || missing+=("$name")
  done
  if [ "${#missing[@]}" = 0 ]; then
    return 0
  fi
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    die "missing system packages: ${missing[*]} (as root: apt-get install -y ${missing[*]})"
  fi
  say "Installing system packages: ${missing[*]}"
  log="$(mktemp)"
  if ! install_packages "${missing[@]}" >"$log" 2>&1 </dev/null; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    die "could not install: ${missing[*]}"
  fi
  rm -f "$log"
}

# Others use apt too: a second `make`, or what a fresh machine does by itself in its first minutes.
install_packages() {
  update_package_lists && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
    --no-install-recommends -o "DPkg::Lock::Timeout=$APT_WAIT_SECONDS" "$@"
}

# The lock of the lists is not waited for by apt-get itself.
update_package_lists() {
  local text
  local end=$((SECONDS + APT_WAIT_SECONDS))
  until text="$(LC_ALL=C apt-get update -qq 2>&1)"; do
    if [[ "$text" != *"Could not get lock"* ]] || [ "$SECONDS" -ge "$end" ]; then
      printf '%s\n' "$text"
      return 1
    fi
    sleep 2
  done
}

# tracked GLOB...: names of the project's files that match, each ended by a NUL. Works without git.
tracked() {
  if git -C "$ROOT" rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git -C "$ROOT" ls-files -z --cached --others --exclude-standard -- "$@" |
      while IFS= read -r -d '' name; do
        if [ -f "$ROOT/$name" ]; then printf '%s\0' "$name"; fi
      done
    return 0
  fi
  local glob
  for glob in "$@"; do
    (cd "$ROOT" && find . \( -name .git -o -name ".venv*" -o -name build -o -name '.*_cache' \) -prune \
      -o -type f -name "$glob" -printf '%P\0')
  done
}

# only REGEX: those of the NUL-ended names on standard input that match, perhaps none.
only() { grep -zE "$1" || true; }
