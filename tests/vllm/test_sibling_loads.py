"""Another child of MultiConnector loads inside the step, and may fail: what rests on that is in no
store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import harness
import pytest
from kvprism.local_mooncake import LocalMooncake
from kvprism.vllm.metadata import ReportMetadata, StepEnd, StepMetadata
from kvprism.vllm.sibling_loads import SiblingLoads
from test_halves import BLOCK, TOKENS, configuration, describe, saved_blocks
from test_halves import Engine as Halves

pytestmark = pytest.mark.xdist_group("siblings")


@pytest.fixture(scope="module")
def mooncake() -> Iterator[LocalMooncake]:
    with LocalMooncake(storage_bytes=64 << 20) as running:
        yield running


@pytest.fixture
def engine(mooncake: LocalMooncake) -> Iterator[Halves]:
    made = Halves(mooncake, describe(configuration()))
    yield made
    made.half.close()


def begin(
    engine: Halves,
    name: str,
    *,
    hit: int,
    first: int,
    shared: list[Any] | None = None,
    external: int = 0,
) -> Any:
    """A request that vLLM lets in with so many blocks that it does not compute.

    With external ones it waits for a load first.
    """
    request = engine.request(name, [first, *TOKENS[1:]])
    if shared:
        engine.tables[name] = list(shared)
        engine.pool.touch(shared)
    engine.allocate(request, len(TOKENS), external * BLOCK)
    request.num_computed_tokens = hit * BLOCK
    if external:
        return request
    # As vLLM does when it schedules.
    cached = len(shared or ())
    engine.pool.cache_full_blocks(request, engine.tables[name], cached, 4, BLOCK, 0)
    return request


def ids(engine: Halves, name: str) -> list[int]:
    return [block.block_id for block in engine.tables[name]]


def arrives(engine: Halves, metadata: StepMetadata, *, invalid: set[int] | None = None) -> None:
    """The output of a step."""
    assert metadata.answer
    engine.half.take_output(
        SimpleNamespace(
            kv_connector_worker_meta=ReportMetadata(b"", (StepEnd(metadata.step),)),
            invalid_block_ids=invalid or set(),
        )
    )


def computed(*requests: Any) -> None:
    for request in requests:
        request.num_computed_tokens = len(TOKENS)


def found(engine: Halves, request: Any) -> list[bool]:
    """Which of its blocks vLLM's own cache has."""
    return [bool(engine.pool.get_cached_block(each, [0])) for each in request.block_hashes[:4]]


def test_what_was_loaded_inside_a_step_is_saved_once_its_output_is_there(engine: Halves) -> None:
    request = begin(engine, "a", hit=2, first=30)
    metadata = engine.step(a=2 * BLOCK + 1, sibling_loads=True)
    assert metadata.plan == b""
    computed(request)
    # With asynchronous scheduling the next step is planned before.
    second = engine.step(a=1)
    assert second.plan == b""
    arrives(engine, metadata)
    third = engine.step(a=1)
    assert saved_blocks(third.plan) == ids(engine, "a")[:4]
    arrives(engine, second)
    arrives(engine, third)
    assert not engine.step().answer
    assert not engine.half._siblings


def test_what_rests_on_a_failed_load_is_never_saved(engine: Halves) -> None:
    wrong = begin(engine, "wrong", hit=2, first=31)
    table = ids(engine, "wrong")
    beside = begin(engine, "beside", hit=2, first=32)
    shared = engine.tables["wrong"][:3]
    sharing = begin(engine, "sharing", hit=3, first=31, shared=shared)
    fresh = begin(engine, "fresh", hit=0, first=33)
    metadata = engine.step(
        wrong=2 * BLOCK + 1,
        beside=2 * BLOCK + 1,
        sharing=BLOCK + 1,
        fresh=4 * BLOCK + 1,
        sibling_loads=True,
    )
    assert saved_blocks(metadata.plan) == ids(engine, "fresh")[:4], "it rests on nothing"
    assert found(engine, wrong) == [True] * 4
    # With asynchronous scheduling others may find the blocks before the output is there.
    late = begin(engine, "late", hit=2, first=31, shared=engine.tables["wrong"][:2])
    waiting = begin(
        engine, "waiting", hit=4, first=31, shared=engine.tables["wrong"][:2], external=2
    )
    computed(wrong, beside, sharing, fresh)
    assert engine.step(wrong=1, beside=1, sharing=1, fresh=1, late=2 * BLOCK + 1).plan == b""
    arrives(engine, metadata, invalid={table[1]})
    assert found(engine, wrong) == [True, False, False, False], "before vLLM schedules again"
    assert found(engine, beside) == [True] * 4
    # What vLLM truncates it computes again.
    wrong.num_computed_tokens = BLOCK
    sharing.num_computed_tokens = 3 * BLOCK
    plan = engine.step(wrong=3 * BLOCK + 1, beside=1, sharing=BLOCK + 1).plan
    assert saved_blocks(plan) == ids(engine, "beside")[:4]
    computed(wrong, sharing, late)
    assert waiting.num_computed_tokens == 4 * BLOCK
    assert engine.step(wrong=1, beside=1, sharing=1, late=1, waiting=1).plan == b""
    # Preempted, it is computed from its start.
    engine.pool.free_blocks(reversed(engine.tables.pop("wrong")))
    wrong.num_computed_tokens = 0
    engine.preempted = {"wrong"}
    engine.allocate(wrong, len(TOKENS))
    plan = engine.step(wrong=len(TOKENS)).plan
    assert saved_blocks(plan) == ids(engine, "wrong")[:4]


def test_what_was_loaded_in_a_step_whose_output_is_lost_is_never_saved(engine: Halves) -> None:
    request = begin(engine, "a", hit=2, first=34)
    engine.step(a=2 * BLOCK + 1, sibling_loads=True)
    computed(request)
    later = engine.step(a=1)
    arrives(engine, later)
    other = begin(engine, "b", hit=2, first=35)
    assert engine.step(a=1, b=2 * BLOCK + 1).plan == b"", "a step is lost, whatever it loaded"
    assert found(engine, request) == [False] * 4
    assert found(engine, other) == [True] * 4
    assert engine.step(a=1).plan == b""


def test_what_rests_on_wrong_blocks_is_found_in_whichever_order_it_began() -> None:
    """Of a window the first blocks are null: one may rest on nothing but what another computed."""
    loads = SiblingLoads()
    loads.step(1, True, {"last": [0, 9], "then": [0, 8, 9], "first": [7, 8], "not": [0, 5]}, _none)
    assert loads.ended(1, {7}) == (["first", "then", "last"], {7, 8, 9})
    assert "not" in loads


def _none(name: str) -> list[int]:
    """The table of a request that is not scheduled."""
    return []


def test_what_waits_for_a_load_beside_one_that_fails_is_saved_unless_it_rests_on_it(
    engine: Halves,
) -> None:
    wrong = begin(engine, "wrong", hit=2, first=36)
    metadata = engine.step(wrong=2 * BLOCK + 1, sibling_loads=True)
    waiting = begin(engine, "waiting", hit=4, first=37, external=4)
    second = engine.step(wrong=1)
    assert second.refused == ("waiting",)
    assert "waiting" in engine.half._siblings
    arrives(engine, metadata, invalid={ids(engine, "wrong")[1]})
    computed(wrong)
    assert saved_blocks(engine.step(wrong=1, waiting=1).plan) == ids(engine, "waiting")[:4]
    assert waiting.num_computed_tokens == 4 * BLOCK


def test_steps_that_all_load_hold_nobody_back_for_ever(engine: Halves) -> None:
    before = begin(engine, "r0", hit=1, first=40)
    metadata = engine.step(sibling_loads=True, r0=3 * BLOCK + 1)
    for number in range(1, 4):
        request = begin(engine, f"r{number}", hit=1, first=40 + number)
        arrives(engine, metadata)
        computed(before)
        scheduled = {before.request_id: 1, request.request_id: 3 * BLOCK + 1}
        metadata = engine.step(sibling_loads=True, **scheduled)
        assert saved_blocks(metadata.plan) == ids(engine, before.request_id)[:4]
        before = request


def test_a_sibling_that_fails_in_a_real_engine(tmp_path: Path) -> None:
    """vLLM computes again what was not loaded, and its answers are right; so is the store."""
    told = tmp_path / "told"
    claimed = harness.prompts(seed=21)
    plain = harness.prompts(seed=22)
    with LocalMooncake(storage_bytes=1 << 30) as mooncake:
        ours = harness.kvprism_connector(mooncake.master)
        sibling = {
            "kv_connector": "FailsInStepConnector",
            "kv_connector_module_path": "faulty",
            "kv_role": "kv_both",
        }
        both = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [sibling, ours]},
        }
        (first,) = harness.run_engines(
            conftest.model("llama"),
            [harness.Engine(both, rounds=[claimed, plain])],
            engine={"block_size": 32},
            environment={"FAILS_IN_STEP": str(told), "FAILS_FOR": str(claimed[0][0])},
        )
        again, alone = harness.run_engines(
            conftest.model("llama"),
            [
                harness.Engine(ours, rounds=[claimed, plain]),
                harness.Engine(None, rounds=[claimed, plain]),
            ],
            engine={"block_size": 32},
        )
    assert told.read_text() == "4 blocks\n"
    for number in range(2):
        assert harness.tokens(first, number) == harness.tokens(alone, number)
        assert harness.tokens(again, number) == harness.tokens(alone, number)
    assert harness.hits(again) == 0, "all of them rest on it"
    assert harness.hits(again, 1) == 2432
