"""One engine of the demonstration, from start to end.

``python -m kvprism.demo.engine`` runs it in a process of its own, so that nothing but the store can
hand bytes from one engine to the next: a JSON object with the task on stdin, the result on stdout.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from .. import sim
from .._core import ObjectStore, StoreScheduler, StoreWorker, TimedOutError, mooncake_store
from . import workload
from .workload import Tokens, Variant

# Of one round of turns; the whole demonstration takes far less.
ROUND_SECONDS = 60.0

History = list[list[int]]


class _Engine:
    """A simulated engine with scheduler, worker and memory of its own."""

    def __init__(self, variant: Variant, store: ObjectStore) -> None:
        self.memory = sim.SimMemory(variant.projection, shadow=True)
        self.engine = sim.Engine(
            StoreScheduler(variant.schema, store),
            StoreWorker(variant.schema, self.memory.segment_map(), store),
            self.memory,
        )
        self.rings = sim.RingDetector(variant.projection)
        self.next_request = 1

    def serve(self, prompts: list[Tokens]) -> list[Tokens]:
        """Serves one prompt of each conversation and returns them with their outputs."""
        turns: dict[int, Tokens] = {}
        for prompt in prompts:
            turns[self.next_request] = prompt
            self.engine.submit(self.next_request, prompt, workload.OUTPUT_TOKENS)
            self.next_request += 1
        if not self.engine.run_until_idle(ROUND_SECONDS):
            raise TimedOutError(f"demo: not done in {ROUND_SECONDS} s: {self.engine.describe()}")
        for finished in self.engine.take_finished():
            output = np.asarray(finished.output, dtype=np.uint32)
            turns[finished.id] = np.concatenate((turns[finished.id], output))
        return list(turns.values())

    def rings_in_memory(self, prompt: Tokens) -> int:
        """Ring positions found in the engine's memory while it computes: the detector works."""
        self.rings.add(prompt)
        self.engine.submit(self.next_request, prompt, 2)
        self.next_request += 1
        while self.engine.stats()["generated_tokens"] == 0:
            self.engine.step()
        found = self.rings.count(self.memory.array())
        self.engine.run_until_idle(ROUND_SECONDS)
        self.engine.take_finished()
        return found


def fill(variant: Variant, store: ObjectStore) -> dict[str, Any]:
    """Serves the conversations and saves their cache."""
    own = _Engine(variant, store)
    probe = workload.system_prompt()[:100]
    rings = own.rings_in_memory(probe)
    histories = [workload.system_prompt()] * workload.CONVERSATIONS
    begin = time.monotonic()
    for turn in range(workload.TURNS):
        histories = own.serve(
            [
                np.concatenate((history, workload.user_turn(at, turn)))
                for at, history in enumerate(histories)
            ]
        )
    return _result(own, begin) | {
        "ring_positions_in_memory": rings,
        "probe": probe.tolist(),
        "histories": [history.tolist() for history in histories],
    }


def load(variant: Variant, store: ObjectStore, histories: History) -> dict[str, Any]:
    """Continues every conversation with an empty cache: what it does not load it computes."""
    own = _Engine(variant, store)
    begin = time.monotonic()
    texts = own.serve(
        [
            np.concatenate(
                (np.asarray(history, dtype=np.uint32), workload.user_turn(at, workload.TURNS))
            )
            for at, history in enumerate(histories)
        ]
    )
    return _result(own, begin) | {"histories": [text.tolist() for text in texts]}


def _result(own: _Engine, begin: float) -> dict[str, Any]:
    seconds = time.monotonic() - begin
    result = {"stats": own.engine.stats(), "seconds": seconds, "broken": own.engine.check()}
    result["unquiet"] = own.engine.close()
    return result


def main() -> int:
    """Runs the task on stdin."""
    task = json.load(sys.stdin)
    variant = workload.variant(task["variant"])
    store = mooncake_store(master=task["master"])
    if task["histories"] is None:
        result = fill(variant, store)
    else:
        result = load(variant, store, task["histories"])
    json.dump(result | {"store": store.name}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
