"""States where hits may end inside a block: of requests that end early, and beside rings."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import kvprism
import pytest
import test_contract
from kvprism import StepPlan
from kvprism.vllm import cache_config, scheduler_side
from kvprism.vllm.options import read_options
from kvprism.vllm.scheduler_side import SchedulerSide
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

BLOCK, UNIT = 64, 32


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    init_none_hash(sha256)
    model = str(test_contract.conftest.model("llama"))
    return EngineArgs(model=model, enforce_eager=True, block_size=BLOCK).create_engine_config()


class Half:
    """The scheduler's half beside attention (group 0), states (1) and a ring (2)."""

    def __init__(self, vllm_config: Any, ring: int, monkeypatch: pytest.MonkeyPatch) -> None:
        config = test_contract.config("full", "mamba", "ring")
        for group, size in zip(config.kv_cache_groups, (BLOCK, BLOCK, ring), strict=True):
            spec = dataclasses.replace(group.kv_cache_spec, block_size=size)
            object.__setattr__(group, "kv_cache_spec", spec)
        object.__setattr__(config, "cache_hit_alignment_tokens", UNIT)
        described = cache_config.describe(vllm_config, config, (BLOCK, UNIT), "")
        checked = functools.partial(kvprism.StoreScheduler, checked=True)
        monkeypatch.setattr(scheduler_side, "StoreScheduler", checked)
        monkeypatch.setattr(scheduler_side, "open_store", lambda *_, **__: kvprism.memory_store())
        options = read_options({"master_server_address": "nobody:1"}, {})
        self.side = SchedulerSide(described, options, loads=True, saves=True)
        self.pool = BlockPool(config.num_blocks, enable_caching=True, hash_block_size=UNIT)
        self.side.bind_pool(self.pool)
        self.table = self.pool.get_new_blocks(3)
        self.attention, self.state, self.ring = (block.block_id for block in self.table)

    def request(self, tokens: int, name: str = "a", first: int = 4) -> Request:
        request = Request(
            name,
            list(range(first, first + tokens)),
            SamplingParams(max_tokens=8),
            None,
            block_hasher=get_request_block_hasher(UNIT, sha256),
        )
        self.side.new_request(request)
        return request

    def tables(self) -> tuple[list[int], ...]:
        return [self.attention], [self.state], [self.ring]

    def names(self, request: Request, block: int, tokens: int) -> None:
        """vLLM's own cache finds a state."""
        self.pool.cache_partial_block(request, self.pool.blocks[block], tokens, 1, BLOCK)

    def references(self) -> dict[int, int]:
        """Of the connector, on each block that the request has or had."""
        return {block.block_id: block.ref_cnt - 1 for block in self.table if block.ref_cnt > 1}

    def step(self, scheduled: dict[str, int], offers: dict[str, Any]) -> int:
        """Blocks that the step's jobs move."""
        state = SimpleNamespace(
            get_block_ids=lambda _: self.tables(), boundary_state_offloads=offers
        )
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            kv_connector_block_state=state,
            preempted_req_ids=None,
            has_sync_kv_loads=False,
        )
        plan = self.side.end_step(output).plan
        return StepPlan.decode(plan).num_blocks if plan else 0


def test_with_its_last_states_a_request_leaves_what_is_before_them(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = Half(vllm_config, UNIT, monkeypatch)
    request = half.request(UNIT + 10)
    assert half.step({"a": UNIT}, {}) == 0
    request.num_computed_tokens = UNIT
    half.names(request, half.state, UNIT)
    half.side.save_last_states(request, half.tables(), [(1, half.state, UNIT)])
    half.side.finished(request)
    assert half.references() == {half.attention: 1, half.state: 1}
    assert half.step({}, {}) == 2
    half.side.close()


def test_beside_a_ring_states_in_its_middle_are_left_out(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = Half(vllm_config, BLOCK, monkeypatch)
    request = half.request(BLOCK + 10)
    half.names(request, half.state, UNIT)
    assert half.step({"a": UNIT}, {"a": [(1, half.state, UNIT)]}) == 0
    assert half.side.counters()["offers_refused"] == 0
    half.names(request, half.state, BLOCK)
    assert half.step({}, {"a": [(1, half.state, BLOCK)]}) == 1
    assert half.references() == {half.state: 1}
    half.side.close()


def test_a_state_whose_block_somebody_else_has_is_not_saved(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With asynchronous scheduling vLLM offers between steps, and may reuse the block at once."""
    half = Half(vllm_config, BLOCK, monkeypatch)
    first = half.request(3 * BLOCK)
    other = half.request(3 * BLOCK, "b", 70)
    offers = {"a": [(1, half.state, BLOCK)]}
    assert half.step({}, offers) == 0, "its name is gone"
    half.names(other, half.state, BLOCK)
    assert half.step({}, offers) == 0, "somebody else's state"
    half.pool.evict_blocks({half.state})
    half.names(first, half.state, 2 * BLOCK)
    assert half.step({}, offers) == 0, "its own, of more tokens"
    assert half.references() == {}
    half.pool.cache_partial_block(first, half.pool.blocks[half.state], BLOCK, 1, BLOCK)
    assert half.step({}, offers) == 1, "found under two names"
    assert half.references() == {half.state: 1}
    assert half.side.counters()["offers_refused"] == 0
    half.side.close()
