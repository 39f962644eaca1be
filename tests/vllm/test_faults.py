"""The engine goes on, with right answers, whatever becomes of Mooncake."""

from __future__ import annotations

import time
from typing import Any

import conftest
import harness
import pytest
from harness import LiveEngine, tokens_of
from kvprism.local_mooncake import LocalMooncake

ENGINE = {"block_size": 32}
LONG = 14_000
BOUND = 120.0  # seconds in which a store that is back must be used again


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Answers of an engine without a connector."""
    prompts = harness.prompts()
    with LiveEngine(conftest.model("llama"), engine=ENGINE) as engine:
        return engine.serve(prompts)


def check(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    assert tokens_of(answer) == tokens_of(expected)
    assert {output["finish"] for output in answer["outputs"]} == {"length"}


def serve_until_hits(engine: LiveEngine, expected: dict[str, Any]) -> dict[str, Any]:
    """A store that has forgotten everything is filled by one round and used by a later one."""
    end = time.monotonic() + BOUND
    while time.monotonic() < end:
        answer = engine.serve(harness.prompts(), reset=True)
        check(answer, expected)
        if answer["hits"] > 0:
            return answer
    raise AssertionError(f"no hits within {BOUND} s: {answer['counters']}")


def test_the_master_goes_and_comes_back(expected: dict[str, Any]) -> None:
    with (
        LocalMooncake(storage_bytes=1 << 30) as mooncake,
        LiveEngine(
            conftest.model("llama"),
            engine=ENGINE,
            connector=harness.kvprism_connector(
                mooncake.master, saved_fresh_for_seconds=0.001, backoff_seconds=0.5
            ),
        ) as engine,
    ):
        check(engine.serve(harness.prompts()), expected)
        warm = engine.serve(harness.prompts(), reset=True)
        check(warm, expected)
        assert warm["hits"] == 2432

        mooncake.stop_master()
        without = engine.serve(harness.prompts(), reset=True)
        check(without, expected)
        assert without["hits"] == 0
        lost = without["counters"]
        assert lost["lookups_failed"] + lost["lookups_late"] >= 1
        # What the engine itself has cached is served without the store.
        check(engine.serve(harness.prompts()), expected)

        mooncake.start_master()
        serve_until_hits(engine, expected)


def test_the_storage_goes(expected: dict[str, Any]) -> None:
    with (
        LocalMooncake(storage_bytes=1 << 30) as mooncake,
        LiveEngine(
            conftest.model("llama"),
            engine=ENGINE,
            connector=harness.kvprism_connector(mooncake.master),
        ) as engine,
    ):
        check(engine.serve(harness.prompts()), expected)
        mooncake.stop_storage()
        # The master still names the objects: the lookups hit, and the loads fail.
        answer = engine.serve(harness.prompts(), reset=True)
        check(answer, expected)
        assert answer["counters"]["loads"] == answer["counters"]["loads_failed"] == 4
        check(engine.serve(harness.prompts()), expected)


def test_a_pool_that_is_too_small(expected: dict[str, Any]) -> None:
    with (
        LocalMooncake(storage_bytes=16 << 20) as mooncake,
        LiveEngine(
            conftest.model("llama"),
            engine=ENGINE,
            connector=harness.kvprism_connector(mooncake.master, backoff_seconds=0.2),
        ) as engine,
    ):
        long = harness.prompts(seed=5, prefix=8, suffixes=(4000,) * 4)
        engine.serve(long)  # 33 MB of cache for a pool of 16 MB
        answer = engine.serve(harness.prompts())
        check(answer, expected)
        check(engine.serve(harness.prompts(), reset=True), expected)
        counters = answer["counters"]
        assert counters["saved_bytes"] < 33 << 20
        assert counters["save_chunks_failed"] > 0


def test_a_long_prompt_at_the_default_queue_of_mooncake() -> None:
    """437 blocks of 8 layers are 3,496 pieces, and Mooncake's TCP queue holds 1,024."""
    (prompt,) = harness.prompts(seed=3, prefix=0, suffixes=(LONG,))
    with LocalMooncake(storage_bytes=1 << 30) as mooncake:
        path = conftest.model("llama8")
        connector = harness.kvprism_connector(mooncake.master)
        with LiveEngine(path, engine=ENGINE, connector=connector) as engine:
            cold = engine.serve([prompt])
            warm = engine.serve([prompt], reset=True)
        assert tokens_of(warm) == tokens_of(cold)
        assert warm["hits"] == LONG - LONG % 32
        assert warm["counters"]["loads_failed"] == 0
        assert warm["counters"]["save_chunks_failed"] == 0
