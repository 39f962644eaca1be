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
COLUMNS = ("engine", "prompt tokens", "from the store", "seconds", "answers")


def show(name: str, what: str, result: dict[str, Any], expected: dict[str, Any] | None) -> None:
    """One row of the table."""
    first = result["rounds"][0]
    same = expected is None or harness.tokens(result) == harness.tokens(expected)
    answers = "reference" if expected is None else "the same" if same else "DIFFERENT"
    asked = sum(len(prompt) for prompt in PROMPTS)
    print(f"{what:<28}{asked:>14}{harness.hits(result):>16}{first['seconds']:>9.2f}  {answers}")
    if not same:
        raise SystemExit(f"{name}: answers differ")


PROMPTS = harness.prompts(prefix=2000, suffixes=(1000, 1100, 1200, 1300))


def main() -> None:
    """Runs the demonstration."""
    begin = time.monotonic()
    print(
        "Mooncake: a master and a storage process on loopback; vLLM: each engine in a new process"
    )
    for name, meaning in MODELS.items():
        path = models.build(name, ROOT / "build" / "vllm-models")
        print(f"\n{name}: {meaning}")
        print(f"{COLUMNS[0]:<28}{COLUMNS[1]:>14}{COLUMNS[2]:>16}{COLUMNS[3]:>9}  {COLUMNS[4]}")
        with LocalMooncake(storage_bytes=1 << 30) as mooncake:
            connector = harness.kvprism_connector(mooncake.master)
            runs = (
                ("without a connector", None),
                ("empty store", connector),
                ("restarted", connector),
            )
            expected = None
            for what, chosen in runs:
                (result,) = harness.run_engines(
                    path, [Engine(chosen, rounds=[PROMPTS])], engine=ENGINE
                )
                show(name, what, result, expected)
                expected = expected or result
    print(f"\n{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
