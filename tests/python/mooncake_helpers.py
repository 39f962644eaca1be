"""An engine's scheduler and worker on a real Mooncake."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import kvprism
import numpy as np
from kvprism.local_mooncake import LocalMooncake
from store_helpers import BLOCK, Rank, hashes

# Far beyond what anything here takes.
BOUND = 300.0
SOURCES, TARGETS = [3, 1, 7], [5, 6, 2]


def prompt(number: int) -> list[int]:
    """Three whole blocks and a token that is left to compute."""
    return list(range(100 * number, 100 * number + 3 * BLOCK + 1))


@contextmanager
def pause_master(mooncake: LocalMooncake) -> Iterator[None]:
    """The master accepts connections and says nothing."""
    mooncake.pause_master()
    try:
        yield
    finally:
        mooncake.resume_master()


class Engine(Rank):
    """A scheduler and a worker with connections of their own, as in two processes."""

    def __init__(
        self,
        mooncake: LocalMooncake,
        *,
        model: str = "model",
        scheduler: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        def connect() -> kvprism.ObjectStore:
            return kvprism.mooncake_store(master=mooncake.master, **options)

        self.index = connect()
        # An answer must come, however slow the machine, and saving must not pause.
        patient = {"lookup_timeout_seconds": BOUND, "backoff_after": 10_000}
        super().__init__(
            store=connect(),
            index=self.index,
            model=model,
            config=config or {},
            **(patient | (scheduler or {})),
        )
        self.memory[:] = np.random.default_rng(3).integers(
            256, size=self.memory.shape, dtype=np.uint8
        )
        self.end = time.monotonic() + BOUND
        self.last = 0

    def request(self) -> int:
        assert time.monotonic() < self.end
        self.last += 1
        return self.last

    def stored(self, tokens: list[int]) -> int:
        """Saves a prompt and tells how many objects of it were confirmed."""
        request = self.request()
        before = self.scheduler.counters()["saved_objects"]
        self.save(tokens, SOURCES, request)
        self.scheduler.finished(request)
        return self.scheduler.counters()["saved_objects"] - before

    def found(self, tokens: list[int]) -> tuple[int, int]:
        """The request and the tokens that the store offers to it."""
        request = self.request()
        while True:
            offered = self.scheduler.lookup(request, len(tokens), hashes(tokens))
            if offered is not None:
                return request, offered
            assert time.monotonic() < self.end
            self.scheduler.end_step()

    def loaded(self, tokens: list[int]) -> kvprism.LoadEnd | None:
        """The end of a load, None when the store offers nothing."""
        request, offered = self.found(tokens)
        end = None
        if offered:
            self.memory[:, TARGETS] = 0
            assert self.scheduler.allocated(request, offered, [TARGETS]) is not None
            self.step()
            (end,) = self.scheduler.take_load_ends()
            assert end.blocks_quiet
        self.scheduler.finished(request)
        return end

    def holds_nothing(self) -> bool:
        ledger = self.scheduler.counters()["ledger"]
        return (
            ledger["blocks_held"] == ledger["blocks_in_quarantine"] == 0
            and self.scheduler.tracked() == 0
            and self.worker.counters()["jobs_alive"] == 0
        )

    def loads_right(self, tokens: list[int]) -> bool:
        end = self.loaded(tokens)
        return (
            end is not None
            and end.complete
            and end.valid_tokens == 3 * BLOCK
            and bool((self.memory[:, TARGETS] == self.memory[:, SOURCES]).all())
        )
