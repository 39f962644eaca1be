"""A purge against a real Mooncake takes what is ours, all of it, and nothing else."""

from __future__ import annotations

from typing import Any

import kvprism
import pytest
from kvprism.local_mooncake import LocalMooncake
from mooncake_helpers import SOURCES, Engine, hashes, prompt
from store_helpers import Rank

LEASE_MS = 500
SETTLE = {"purge_settle_seconds": 1.0}


def purged(engine: Engine) -> dict[str, Any]:
    """Lets steps go by until the purge is done."""
    engine.scheduler.purge()
    while engine.scheduler.purge_status()["state"] != "done":
        engine.request()
        engine.scheduler.end_step()
        report = engine.worker.wait(0.05)
        if report is not None:
            engine.scheduler.report(report)
            engine.scheduler.take_released()
    return engine.scheduler.purge_status()


@pytest.mark.mooncake
@pytest.mark.parametrize("keys", ["kvprism", "vllm"])
def test_the_neighbours_objects_stay(keys: str) -> None:
    """Those of another model, and those of the same model in another namespace."""
    flags = {"default_kv_lease_ttl": LEASE_MS}
    with LocalMooncake(storage_bytes=64 << 20, master_flags=flags) as mooncake:
        config = {"key_schema": keys, "namespace": "ours"}
        mine = Engine(mooncake, scheduler=SETTLE, config=config)
        neighbours = [
            Engine(mooncake, model="another", scheduler=SETTLE, config=config),
            # Ours is the beginning of its name.
            Engine(mooncake, scheduler=SETTLE, config=config | {"namespace": "ours2"}),
        ]
        for engine in (mine, *neighbours):
            assert engine.stored(prompt(1)) == 3
            assert engine.stored(prompt(2)) == 3
            # What is read has a lease: the first pass leaves it.
            assert engine.loads_right(prompt(1))
        status = purged(mine)
        assert status["removed"] == 6
        assert status["passes"] >= 2
        assert mine.loaded(prompt(1)) is None
        assert mine.loaded(prompt(2)) is None
        for neighbour in neighbours:
            assert neighbour.loads_right(prompt(1))
            assert neighbour.loads_right(prompt(2))
            neighbour.close()
        assert mine.stored(prompt(1)) == 3, "although the same prefix was saved lately"
        assert mine.loads_right(prompt(1))
        assert mine.holds_nothing()
        mine.close()


@pytest.mark.mooncake
def test_a_save_in_flight_does_not_come_back() -> None:
    flags = {"default_kv_lease_ttl": LEASE_MS}
    with LocalMooncake(storage_bytes=64 << 20, master_flags=flags) as mooncake:
        engine = Engine(mooncake, scheduler=SETTLE)
        assert engine.stored(prompt(1)) == 3
        tokens, request = prompt(2), engine.request()
        engine.scheduler.advanced(request, len(tokens), hashes(tokens))
        mooncake.pause_storage()
        span = engine.scheduler.wants_save(request)
        assert span is not None
        engine.scheduler.save(request, span, [SOURCES])
        assert engine.worker.submit(engine.scheduler.end_step(), kvprism.ReadyToken.host())
        assert engine.worker.wait(0.5) is None
        engine.scheduler.purge()
        for _ in range(5):
            engine.scheduler.end_step()
            assert engine.worker.wait(0.1) is None
        status = engine.scheduler.purge_status()
        assert (status["state"], status["removed"]) == ("draining", 0), "the save may still land"
        mooncake.resume_storage()
        assert purged(engine)["removed"] == 6, "also what landed meanwhile"
        engine.scheduler.finished(request)
        assert engine.loaded(prompt(1)) is None
        assert engine.loaded(prompt(2)) is None
        assert engine.holds_nothing()
        engine.close()


def test_in_memory_at_once() -> None:
    pool = kvprism.MemoryPool()
    rank = Rank(pool, purge_settle_seconds=1e-9)
    assert rank.scheduler.purge_status() == {"state": "none", "removed": 0, "passes": 0}
    rank.save(prompt(1), SOURCES)
    assert pool.counters()["objects"] == 3
    rank.scheduler.purge()
    while rank.scheduler.purge_status()["state"] != "done":
        rank.scheduler.end_step()
    assert rank.scheduler.purge_status()["removed"] == 3
    assert pool.counters()["objects"] == 0
    rank.close()
