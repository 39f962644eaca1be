"""What an engine sees when a part of a real Mooncake dies (R51)."""

from __future__ import annotations

import time

import kvprism
import numpy as np
import pytest
from kvprism.local_mooncake import LocalMooncake
from store_helpers import BLOCK, Rank, hashes

pytestmark = pytest.mark.mooncake

# Far beyond what anything here takes.
BOUND = 90.0
SOURCES, TARGETS = [3, 1, 7], [5, 6, 2]


def prompt(number: int) -> list[int]:
    """Three whole blocks and a token that is left to compute."""
    return list(range(100 * number, 100 * number + 3 * BLOCK + 1))


class Engine(Rank):
    """A scheduler and a worker with connections of their own, as in two processes."""

    def __init__(self, mooncake: LocalMooncake) -> None:
        def connect() -> kvprism.ObjectStore:
            return kvprism.mooncake_store(master=mooncake.master)

        # An answer must come, however slow the machine, and saving must not pause.
        super().__init__(
            store=connect(), index=connect(), lookup_timeout_seconds=BOUND, backoff_after=10_000
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


def test_a_storage_process_that_dies_costs_loads_and_nothing_else() -> None:
    with LocalMooncake(storage_bytes=64 << 20, master_flags={"client_ttl": 5}) as mooncake:
        engine = Engine(mooncake)
        assert engine.stored(prompt(1)) == 3
        assert engine.loads_right(prompt(1))
        mooncake.stop_storage()
        failed = 0
        # The master believes in the objects until the storage process has been silent for long.
        while (end := engine.loaded(prompt(1))) is not None:
            assert not end.complete
            assert end.valid_tokens == 0
            assert sorted(block.block for block in end.failed) == sorted(TARGETS)
            failed += 1
            engine.worker.wait(0.1)
        assert failed > 0
        assert engine.scheduler.counters()["loads_failed"] == failed
        assert engine.stored(prompt(2)) == 0
        assert engine.holds_nothing()
        engine.close()


def test_storage_joins_a_restarted_master_and_the_pool_is_empty() -> None:
    with LocalMooncake(storage_bytes=64 << 20) as mooncake:
        engine = Engine(mooncake)
        assert engine.stored(prompt(1)) == 3
        assert engine.loads_right(prompt(1))
        mooncake.stop_master()
        assert engine.loaded(prompt(1)) is None
        assert engine.stored(prompt(2)) == 0
        mooncake.start_master()
        attempt = 3
        while engine.stored(prompt(attempt)) != 3:
            attempt += 1
            engine.worker.wait(0.1)
        assert engine.loads_right(prompt(attempt))
        assert engine.loaded(prompt(1)) is None
        assert engine.store.counters()["replacements"] > 0
        assert engine.holds_nothing()
        engine.close()


def test_a_read_that_outlives_its_lease_is_a_failed_load() -> None:
    """The memory may hold another object by then (R43)."""
    with LocalMooncake(
        storage_bytes=64 << 20, master_flags={"default_kv_lease_ttl": 200}
    ) as mooncake:
        engine = Engine(mooncake)
        assert engine.stored(prompt(1)) == 3
        assert engine.loads_right(prompt(1))
        request, offered = engine.found(prompt(1))
        assert engine.scheduler.allocated(request, offered, [TARGETS]) is not None
        mooncake.pause_storage()
        assert engine.worker.submit(engine.scheduler.end_step(), kvprism.ReadyToken.host())
        assert engine.worker.wait(2.0) is None, "ten leases without an answer"
        mooncake.resume_storage()
        engine.settle()
        (end,) = engine.scheduler.take_load_ends()
        assert not end.complete
        assert end.valid_tokens == 0
        assert end.blocks_quiet
        assert engine.store.counters()["replacements"] == 0
        engine.scheduler.finished(request)
        assert engine.holds_nothing()
        engine.close()
