"""What an engine sees when a part of a real Mooncake dies or is slow (R43, R51)."""

from __future__ import annotations

import time

import kvprism
import pytest
from children import Child
from kvprism.local_mooncake import LocalMooncake
from mooncake_helpers import BOUND, TARGETS, Engine, prompt
from store_helpers import BLOCK

pytestmark = pytest.mark.mooncake


def test_a_storage_process_that_dies_costs_loads_and_nothing_else() -> None:
    with LocalMooncake(storage_bytes=64 << 20, master_flags={"client_ttl": 5}) as mooncake:
        # Nothing that has failed counts as absent for a while: each load is of another prompt.
        engine = Engine(mooncake, scheduler={"avoid_failed_for_seconds": BOUND})
        prompts = [prompt(number) for number in range(1, 8)]
        for tokens in prompts:
            assert engine.stored(tokens) == 3
        assert engine.loads_right(prompts[0])
        mooncake.stop_storage()
        # The master believes in the objects until the storage process has been silent for long.
        ends = [end for tokens in prompts if (end := engine.loaded(tokens)) is not None]
        for end in ends:
            assert not end.complete
            assert end.valid_tokens == 0
            assert sorted(block.block for block in end.failed) == sorted(TARGETS)
        counters = engine.scheduler.counters()
        assert counters["loads_failed"] == len(ends) == 3, "then nothing is offered for a while"
        assert counters["offers_paused"] == 1
        assert engine.stored(prompt(8)) == 0
        assert engine.holds_nothing()
        engine.close()


def test_where_one_of_two_storage_processes_dies_few_loads_find_out() -> None:
    """Prompts of one block lie on either of them, and the master believes in both (R51)."""
    with LocalMooncake(storage_bytes=64 << 20, master_flags={"client_ttl": 120}) as mooncake:
        other = Child("lend", mooncake.master)
        try:
            other.says("lent")
            engine = Engine(mooncake, scheduler={"avoid_failed_for_seconds": BOUND})
            prompts = [prompt(number)[: BLOCK + 1] for number in range(1, 41)]
            for tokens in prompts:
                assert engine.stored(tokens) == 1
            other.process.kill()
            ends = [end for tokens in prompts if (end := engine.loaded(tokens)) is not None]
            whole = sum(end.complete for end in ends)
            failed = len(ends) - whole
            counters = engine.scheduler.counters()
            assert failed > 0, "nothing lay on it"
            assert 2 * failed <= whole + 7
            assert counters["offers_paused"] == (len(ends) < len(prompts))
            assert engine.store.counters()["replacements"] <= failed
            assert engine.holds_nothing()
            engine.close()
        finally:
            other.end()


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
