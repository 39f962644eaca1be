"""vLLM with a store that outlives it: an engine fills the store, ends, and another one continues.

``make demo-vllm`` runs it: real vLLM on CPU, a real Mooncake on loopback, and two tiny models with
random weights, one with sliding windows and one with a scratch ring in every layer.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "vllm"))

import harness  # noqa: E402
import models  # noqa: E402
from harness import Engine  # noqa: E402
from kvprism.local_mooncake import LocalMooncake  # noqa: E402

MODELS = {
    "gemma3": "full attention and sliding windows",
    "ring_llama": "full attention and scratch rings",
}
ENGINE = {"block_size": 32}
PROMPTS = harness.prompts(prefix=2000, suffixes=(1000, 1100, 1200, 1300))
ROW = "{:<12}{:<24}{:>14}{:>16}{:>9}  {}"


def show(model: str, what: str, result: dict[str, Any], expected: dict[str, Any], at: int) -> None:
    """One row of the table: a round of an engine, and whether it answers as the first did."""
    same = harness.tokens(result, at) == harness.tokens(expected)
    answers = "reference" if result is expected else "the same" if same else "DIFFERENT"
    asked = sum(len(prompt) for prompt in PROMPTS)
    seconds = f"{result['rounds'][at]['seconds']:.2f}"
    print(ROW.format(model, what, asked, harness.hits(result, at), seconds, answers), flush=True)
    if not same:
        raise SystemExit(f"{model}: answers differ")


def main() -> None:
    """Runs the demonstration."""
    begin = time.monotonic()
    print("Mooncake: a master and a storage process on loopback; each engine in a new process")
    for name, meaning in MODELS.items():
        print(f"{name}: {meaning}")
    print()
    columns = ("model", "engine", "prompt tokens", "from the store", "seconds", "answers")
    print(ROW.format(*columns), flush=True)
    for name in MODELS:
        path = models.build(name, ROOT / "build" / "vllm-models")

        def run(connector: dict[str, Any] | None, rounds: int = 1, path: Path = path) -> Any:
            engine = Engine(connector, rounds=[PROMPTS] * rounds, reset=True)
            (result,) = harness.run_engines(path, [engine], engine=ENGINE)
            return result

        with LocalMooncake(storage_bytes=1 << 30) as mooncake:
            connector = harness.kvprism_connector(mooncake.master)
            expected = run(None)
            show(name, "without a connector", expected, expected, 0)
            show(name, "cold: an empty store", run(connector), expected, 0)
            restarted = run(connector, 2)
            show(name, "restarted", restarted, expected, 0)
            # Its own cache was emptied before.
            show(name, "warm: the same again", restarted, expected, 1)
    print(f"\n{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
