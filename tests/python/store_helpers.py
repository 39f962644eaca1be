"""A scheduler and a worker over memory of the test's own, as an engine would hold them."""

from __future__ import annotations

import hashlib
from typing import Any

import configs
import kvprism
import numpy as np
import numpy.typing as npt

BLOCK = 4
NUM_BLOCKS = 16
LAYERS = ("f0", "f1")
SETTLE_SECONDS = 120.0  # beyond what Mooncake itself waits for


def projection(**changes: Any) -> kvprism.Projection:
    """Of one group; `changes` are those of the cache config."""
    group = configs.attention(
        layers=list(LAYERS), block_size=BLOCK, num_kv_heads=1, head_size=8, dtype="float16"
    )
    config = configs.config(group, num_blocks=NUM_BLOCKS, **changes)
    return kvprism.Projection(kvprism.CacheConfig.from_dict(config))


def schema(groups: kvprism.Projection, model: str = "model") -> kvprism.KeySchema:
    return kvprism.KeySchema.make(groups, model=model, hash_algorithm="sha256", hash_is_stable=True)


def hashes(tokens: list[int], width: int = 32) -> list[bytes]:
    """One for each whole block, chained as engines do."""
    chain, out = b"", []
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        chain = hashlib.sha256(chain + str(tokens[end - BLOCK : end]).encode()).digest()
        out.append((chain * 2)[:width])
    return out


class Rank:
    """What one engine has: memory of [layer][block] pages, a scheduler and a worker."""

    def __init__(self, pool: kvprism.MemoryPool | None = None, **options: Any) -> None:
        self.projection = projection(**options.pop("config", {}))
        self.schema = schema(self.projection, options.pop("model", "model"))
        page = self.projection.groups()[0].page_size_bytes
        self.memory: npt.NDArray[np.uint8] = np.zeros(
            (len(LAYERS), NUM_BLOCKS, page), dtype=np.uint8
        )
        tensor = kvprism.CacheTensor(
            self.memory, layers=list(LAYERS), layer_stride=NUM_BLOCKS * page, block_stride=page
        )
        self.store = options.pop("store", None) or kvprism.memory_store(pool)
        index = options.pop("index", self.store)
        only = options.pop("only", False)
        self.scheduler = kvprism.StoreScheduler(self.schema, index, **options)
        self.worker = kvprism.StoreWorker(
            self.schema, kvprism.SegmentMap(self.projection, [tensor]), self.store, only=only
        )

    def step(self) -> kvprism.StepPlan:
        """Ends a step, and waits until its jobs have been reported."""
        plan = self.scheduler.end_step()
        if plan:
            assert self.worker.submit(plan, kvprism.ReadyToken.host())
            self.settle()
        return plan

    def settle(self) -> None:
        while self.scheduler.has_pending_work():
            report = self.worker.wait(SETTLE_SECONDS)
            assert report is not None, "the worker has nothing to tell"
            self.scheduler.report(report)
            self.scheduler.take_released()
            if self.scheduler.counters()["ledger"]["alive"] == 0:
                return

    def save(self, tokens: list[int], blocks: Any, request: int = 1) -> kvprism.StepPlan:
        """Computes a prompt as far as the scheduler is concerned, and saves its blocks."""
        self.scheduler.advanced(request, len(tokens), hashes(tokens))
        span = self.scheduler.wants_save(request)
        assert span is not None
        self.scheduler.save(request, span, [blocks])
        return self.step()

    def lookup(self, tokens: list[int], request: int = 2) -> int:
        offered = self.scheduler.lookup(request, len(tokens), hashes(tokens))
        for _ in range(100):
            if offered is not None:
                return offered
            self.step()
            offered = self.scheduler.lookup(request, len(tokens), hashes(tokens))
        raise AssertionError("no answer")

    def close(self) -> None:
        assert self.worker.close() == 0
        assert self.scheduler.close() == 0
