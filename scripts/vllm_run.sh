#!/usr/bin/env bash
# vllm_run.sh ARGUMENTS: runs .venv-vllm's Python in a network namespace that has nothing but
# loopback: Mooncake's transfer engine listens on every address.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

bash scripts/vllm_env.sh

# vLLM, PyTorch and transformers are compiled once, whatever the environment says of bytecode.
export PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX="$ROOT/build/pycache"

space="kvprism-vllm-$$"
run=()
if ip netns add "$space" 2>/dev/null; then
  trap 'ip netns delete "$space"' EXIT
  ip netns exec "$space" ip link set lo up
  run=(ip netns exec "$space")
else
  say "No network namespace may be made here: the host's own loopback is used"
fi
"${run[@]}" .venv-vllm/bin/python "$@"
