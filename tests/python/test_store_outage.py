"""What an engine sees when a part of a real Mooncake dies or is slow (R43, R51)."""

from __future__ import annotations

import time

import kvprism
import pytest
from kvprism.local_mooncake import LocalMooncake
from mooncake_helpers import TARGETS, Engine, prompt

pytestmark = pytest.mark.mooncake


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
        # Lookups have a client of their own, which asks for the master once a second.
        while not engine.index.counters()["usable"]:
            assert time.monotonic() < engine.end
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
