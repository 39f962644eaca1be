"""What vLLM takes out of a step again is neither found nor saved: its scheduler, without a model.

vLLM gives blocks their hashes when it schedules a request. With priorities it may preempt that
request later in the same step, so that nobody ever writes them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import kvprism
import pytest
import test_layouts
from kvprism import StepPlan
from kvprism.vllm import scheduler_side, worker_side
from test_decisions import BLOCK, LAYOUT, Ours, layers, prompt_of

BLOCKS = {"full": 13, "windows": 21, "states": 18}
ROUNDS = {"full": 150, "windows": 60, "states": 60}  # until it has happened some times

Named = set[tuple[bytes, int]]  # key of vLLM's own cache, and block


class Watched(Ours):
    """Knows which names of vLLM's own cache are true."""

    options: ClassVar = {"enable_lookup": False}  # every run schedules the same

    def __init__(self, config: Any, pool: kvprism.MemoryPool) -> None:
        # Several are computed in a step, each in many.
        chunks = {"long_prefill_token_threshold": 2 * BLOCK}
        super().__init__(config, 4 * BLOCK, pool, scheduling_policy="priority", **chunks)
        self._build = self.connector.build_connector_meta
        self.connector.build_connector_meta = self._end_step
        self._allocate = self.scheduler.kv_cache_manager.allocate_slots
        self.scheduler.kv_cache_manager.allocate_slots = self._allocate_slots
        self._allocated: set[str] = set()
        self._job = 0  # the last one that was planned
        self.computed: Named = set()
        self.taken_back = 0  # requests
        self.forgotten = 0  # names
        self.saved = 0  # blocks

    def _allocate_slots(self, request: Any, *arguments: Any, **more: Any) -> Any:
        blocks = self._allocate(request, *arguments, **more)
        if blocks is not None:
            self._allocated.add(request.request_id)
        return blocks

    def _named(self) -> Named:
        pool = self.scheduler.kv_cache_manager.block_pool
        others = pool.cached_block_hashes_by_block
        return {
            (key, block.block_id)
            for block in pool.blocks
            for key in (block.block_hash, *others.get(block.block_id, ()))
            if key is not None
        }

    def _end_step(self, output: Any) -> Any:
        scheduled = output.num_scheduled_tokens
        before = self._named()
        self.computed &= before
        for name, request in self.scheduler.requests.items():
            until = request.num_computed_tokens + scheduled.get(name, 0)
            hashes = set(request.block_hashes[: until // self.unit])
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            held = {block for table in tables for block in table}
            self.computed |= {
                (key, block) for key, block in before if block in held and key[:-4] in hashes
            }
        self.taken_back += len(
            (output.preempted_req_ids or set()) & self._allocated - scheduled.keys()
        )
        self._allocated.clear()
        metadata = self._build(output)
        named = self._named()
        assert named <= self.computed, "a name of what nobody has computed"
        assert not (before - named) & self.computed, "somebody has computed it"
        self.forgotten += len(before - named)
        saved = self._saved_blocks(metadata)
        assert set(saved) <= {block for _, block in self.computed}
        self.saved += len(saved)
        return metadata

    def _saved_blocks(self, metadata: Any) -> list[int]:
        if not metadata.plan:
            return []
        plan = StepPlan.decode(metadata.plan)
        loads = {job for job, _ in metadata.loads}
        moved, saved = 0, []
        while moved < plan.num_blocks:
            self._job += 1
            assert self._job < 100_000
            blocks = plan.blocks(self._job)
            moved += len(blocks)
            saved += blocks if self._job not in loads else []
        return saved


@pytest.fixture
def watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(test_layouts, "BLOCKS", BLOCKS[request.param])
    checked = functools.partial(kvprism.StoreScheduler, checked=True)  # refuses calls out of order
    monkeypatch.setattr(scheduler_side, "StoreScheduler", checked)
    pool = kvprism.MemoryPool()
    for side in (scheduler_side, worker_side):
        monkeypatch.setattr(side, "open_store", lambda *_, **__: kvprism.memory_store(pool))
    made = Watched(test_layouts.engine(LAYOUT, layers(request.param)), pool)
    yield made
    made.close()


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(4, 500) for _ in range(count)]


@pytest.mark.parametrize(("watched", "rounds"), list(ROUNDS.items()), indirect=["watched"])
def test_what_is_taken_out_of_a_step_is_neither_found_nor_saved(
    watched: Watched, rounds: int
) -> None:
    draw = random.Random(5)
    known: list[list[int]] = []
    for round_number in range(rounds):
        # The first is computed in many steps, and makes room for those behind it, which soon need
        # another block.
        long = prompt_of(draw, known, 3) + tokens(draw, 5 * BLOCK)
        asked = [
            (long, 9),
            *((prompt_of(draw, known, 2, 2) + tokens(draw, 10), 1) for _ in range(3)),
        ]
        known += [prompt for prompt, _ in asked]
        for at, (prompt, priority) in enumerate(asked):
            answer = draw.randrange(1, 4 if priority == 9 else 3 * BLOCK)
            watched.add(f"{round_number}-{at}", prompt, answer, priority)
            for _ in range(draw.randrange(2)):
                watched.step()
        steps = 0
        while watched.busy():
            watched.step()
            steps += 1
            assert steps < 1000, watched.trace[-8:]
    assert watched.taken_back > 3
    assert watched.forgotten > 3
    assert watched.saved > 200
