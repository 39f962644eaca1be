# Sourced by the other scripts: paths and the check for system packages.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
BUILD="$ROOT/build/release"
JOBS="$(nproc 2>/dev/null || echo 2)"
export ROOT VENV BUILD JOBS

say() { printf '\n== %s\n' "$*"; }

die() {
  printf 'kvprism: %s\n' "$*" >&2
  exit 2
}

# missing_packages NAME...: prints those that are not installed.
missing_packages() {
  local name
  for name in "$@"; do
    if [ "$(dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null)" != installed ]; then
      printf '%s\n' "$name"
    fi
  done
}

# need_packages NAME...: installs what is missing, or names it and ends with status 2.
need_packages() {
  if ! command -v dpkg-query >/dev/null; then
    echo "kvprism: no dpkg here, system packages are not checked ($*)" >&2
    return 0
  fi
  local missing
  missing="$(missing_packages "$@" | tr '\n' ' ')"
  missing="${missing% }"
  if [ -z "$missing" ]; then
    return 0
  fi
  if [ "$(id -u)" != 0 ]; then
    die "missing system packages; as root: apt-get install -y --no-install-recommends $missing"
  fi
  say "Installing system packages: $missing"
  local log
  log="$(mktemp)"
  # shellcheck disable=SC2086
  if ! { apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing; } \
    >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    die "could not install: $missing"
  fi
  rm -f "$log"
}
