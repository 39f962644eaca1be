"""Time to the first token of a long prompt that is in the store, with the real vLLM on CPU.

Arms: without a store (the prompt is computed), the built-in connector with Mooncake's TCP queue
raised (at its default it loses the load of such a prompt), and this project's connector, with the
queue as it is. Each arm is an engine of its own on a Mooncake of its own; they take turns, and the
engine's own cache is emptied before every round. Answers are compared.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "vllm"))

import harness  # noqa: E402
import models  # noqa: E402
from harness import LiveEngine, tokens_of  # noqa: E402
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


def start(arm: str, model: Path, stack: ExitStack) -> LiveEngine:
    """An engine of an arm, on a Mooncake of its own; both end with the stack."""
    mooncake = stack.enter_context(LocalMooncake(storage_bytes=1 << 30))
    connector: dict[str, Any] | None = None
    environment: dict[str, str] = {}
    if arm.startswith("built-in"):
        connector = BUILTIN
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = builtin_environment(mooncake, folder)
        environment |= RAISED if "raised" in arm else {}
    elif arm == "kvprism":
        connector = harness.kvprism_connector(mooncake.master)
    engine = LiveEngine(
        model, engine={"block_size": 32}, connector=connector, environment=environment
    )
    stack.enter_context(engine)
    # The built-in connector may hang when it is closed.
    stack.callback(engine.kill, signal.SIGKILL)
    return engine


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=14_000)
    parser.add_argument("--rounds", type=int, default=10, help="warm rounds of each arm")
    parser.add_argument("--default-queue", action="store_true", help="built-in with it, too")
    args = parser.parse_args()

    arms = ["built-in, queue raised", "kvprism"]
    if args.default_queue:
        arms.append("built-in, default queue")
    model = models.build("llama8", ROOT / "build" / "vllm-models")
    (prompt,) = harness.prompts(seed=3, prefix=0, suffixes=(args.tokens,))
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        engines = {arm: start(arm, model, stack) for arm in ["no store", *arms]}
        for arm, engine in engines.items():
            cold = engine.serve([prompt], max_tokens=1, settle=True)
            results[arm] = {"cold": cold["seconds"], "tokens": tokens_of(cold), "warm": []}
        for round_number in range(args.rounds):
            # A B, B A: what else the machine does is shared alike.
            for arm in arms[:: 1 if round_number % 2 else -1]:
                warm = engines[arm].serve([prompt], max_tokens=1, reset=True)
                results[arm]["warm"].append((warm["seconds"], warm["cpu_seconds"]))
                results[arm]["hits"] = warm["hits"]
                same = tokens_of(warm) == results["no store"]["tokens"]
                results[arm]["same"] = same and results[arm].get("same", True)
    print(f"{'':26}{'cold s':>8}{'warm s':>8}{'least':>8}{'cpu s':>8}{'stored':>9}  answers")
    for arm in arms:
        row = results[arm]
        seconds = [each for each, _ in row["warm"]]
        cpu = statistics.median(each for _, each in row["warm"])
        print(
            f"{arm:26}{row['cold']:>8.2f}{statistics.median(seconds):>8.3f}{min(seconds):>8.3f}"
            f"{cpu:>8.3f}{row['hits']:>9}  {'the same' if row['same'] else 'DIFFERENT'}"
        )
    pairs = zip(results[arms[0]]["warm"], results["kvprism"]["warm"], strict=True)
    ratios = sorted(theirs / ours for (theirs, _), (ours, _) in pairs)
    print(
        f"computed: {results['no store']['cold']:.2f} s; built-in over kvprism, pairs of rounds: "
        f"median {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}"
    )
    print(json.dumps({"arguments": vars(args), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
