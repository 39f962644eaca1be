"""Time to the first token of a long prompt that is in the store, with the real vLLM on CPU.

Arms: without a store (the prompt is computed), the built-in connector with Mooncake's TCP queue
raised (at its default it loses the load of such a prompt), and this project's connector, with the
queue as it is. Each arm is an engine of its own on a Mooncake of its own; the engine's own cache is
emptied before every round. Answers are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "vllm"))

import harness  # noqa: E402
import models  # noqa: E402
from harness import Engine  # noqa: E402
from kvprism.local_mooncake import LocalMooncake  # noqa: E402

BUILTIN = {
    "kv_connector": "MooncakeStoreConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
RAISED = {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384"}


def builtin_environment(mooncake: LocalMooncake, folder: Path) -> dict[str, str]:
    """The file that the built-in connector reads."""
    file = folder / "mooncake.json"
    content = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": mooncake.master,
        "protocol": "tcp",
        "device_name": "",
        "mode": "standalone-store",
        "global_segment_size": 0,
        "local_buffer_size": "64mb",
    }
    file.write_text(json.dumps(content))
    return {"MOONCAKE_CONFIG_PATH": str(file)}


def run(arm: str, model: Path, prompt: list[int], rounds: int) -> dict[str, Any]:
    """One arm: seconds of its warm rounds, tokens from the store, and its answer."""
    with tempfile.TemporaryDirectory() as folder, LocalMooncake(storage_bytes=1 << 30) as mooncake:
        connector: dict[str, Any] | None = None
        environment: dict[str, str] = {}
        if arm.startswith("built-in"):
            connector = BUILTIN
            environment = builtin_environment(mooncake, Path(folder))
            environment |= RAISED if "raised" in arm else {}
        elif arm == "kvprism":
            connector = harness.kvprism_connector(mooncake.master)
        engine = Engine(connector, rounds=[[prompt]] * (1 + rounds), reset=True)
        (result,) = harness.run_engines(
            model,
            [engine],
            engine={"block_size": 32},
            max_tokens=1,
            environment=environment,
            abrupt=True,
        )
    warm = result["rounds"][1:]
    return {
        "cold": result["rounds"][0]["seconds"],
        "warm": statistics.median(each["seconds"] for each in warm),
        "all": [each["seconds"] for each in warm],
        "hits": [each["hits"] for each in warm],
        "tokens": harness.tokens(result, -1),
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=14_000)
    parser.add_argument("--rounds", type=int, default=3, help="warm rounds of each arm")
    parser.add_argument("--default-queue", action="store_true", help="built-in with it, too")
    args = parser.parse_args()

    arms = ["no store", "built-in, queue raised", "kvprism"]
    if args.default_queue:
        arms.append("built-in, default queue")
    model = models.build("llama8", ROOT / "build" / "vllm-models")
    (prompt,) = harness.prompts(seed=3, prefix=0, suffixes=(args.tokens,))
    results = {arm: run(arm, model, prompt, args.rounds) for arm in arms}
    print(f"{'':28}{'cold s':>9}{'warm s':>9}{'from the store':>16}  answer")
    for arm, row in results.items():
        same = row["tokens"] == results["no store"]["tokens"]
        print(
            f"{arm:28}{row['cold']:>9.2f}{row['warm']:>9.3f}{row['hits'][-1]:>16}  "
            f"{'the same' if same else 'DIFFERENT'}"
        )
    print(json.dumps({"arguments": vars(args), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
