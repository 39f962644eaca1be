#!/usr/bin/env bash
# Runs the tests with the real vLLM, in a network namespace that has nothing but loopback: Mooncake's
# transfer engine listens on every address. Arguments go to pytest.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

bash scripts/vllm_env.sh

space="kvprism-vllm-$$"
run=()
if ip netns add "$space" 2>/dev/null; then
  trap 'ip netns delete "$space"' EXIT
  ip netns exec "$space" ip link set lo up
  run=(ip netns exec "$space")
else
  say "No network namespace may be made here: the tests use the host's loopback"
fi

# Tests that share a fixture of engine runs stay together.
"${run[@]}" .venv-vllm/bin/python -m pytest -p no:cacheprovider -o filterwarnings= \
  -o testpaths= tests/vllm "$@"
