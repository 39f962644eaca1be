"""A block of many hash units, of which two requests share a part (R22)."""

from __future__ import annotations

import hashlib

import configs
import kvprism
import numpy as np
import pytest
from store_helpers import schema

BLOCK, UNIT = 8960, 256


def hashes(tokens: list[int]) -> list[bytes]:
    chain, out = b"", []
    for end in range(UNIT, len(tokens) + 1, UNIT):
        chain = hashlib.sha256(chain + str(tokens[end - UNIT : end]).encode()).digest()
        out.append(chain)
    return out


class Store:
    """One request's blocks in a store, and lookups of others."""

    def __init__(self, alignment: int | None) -> None:
        group = configs.attention(
            layers=["f0"], block_size=BLOCK, num_kv_heads=1, head_size=1, dtype="float16"
        )
        sizes = {
            "hash_block_size": UNIT,
            "scheduler_block_size": BLOCK,
            "cache_hit_alignment_tokens": alignment,
        }
        groups = kvprism.Projection(
            kvprism.CacheConfig.from_dict(configs.config(group, num_blocks=4, **sizes))
        )
        page = groups.groups()[0].page_size_bytes
        self.memory = np.ones((1, 4, page), dtype=np.uint8)
        tensor = kvprism.CacheTensor(self.memory, layers=["f0"], block_stride=page)
        store = kvprism.memory_store()
        names = schema(groups)
        self.scheduler = kvprism.StoreScheduler(names, store)
        self.worker = kvprism.StoreWorker(names, kvprism.SegmentMap(groups, [tensor]), store)

    def save(self, tokens: list[int], end: int) -> None:
        self.scheduler.advanced(1, len(tokens), hashes(tokens))
        self.scheduler.save(1, (0, end), [[1, 2]])
        assert self.worker.submit(self.scheduler.end_step(), kvprism.ReadyToken.host())
        while self.scheduler.counters()["ledger"]["alive"]:
            report = self.worker.wait(60.0)
            assert report is not None
            self.scheduler.report(report)
            self.scheduler.take_released()

    def offer(self, tokens: list[int]) -> int:
        offered = self.scheduler.lookup(2, len(tokens), hashes(tokens))
        while offered is None:
            self.scheduler.end_step()
            offered = self.scheduler.lookup(2, len(tokens), hashes(tokens))
        return offered

    def close(self) -> None:
        assert self.worker.close() == 0
        assert self.scheduler.close() == 0


@pytest.mark.parametrize("alignment", [None, UNIT])
@pytest.mark.parametrize("shared", [0, 512, BLOCK - UNIT, BLOCK])
def test_no_more_is_offered_than_is_shared(shared: int, alignment: int | None) -> None:
    store = Store(alignment)
    first = list(range(BLOCK + 1))
    store.save(first, BLOCK)
    assert store.scheduler.counters()["saved_objects"] == 1
    second = first[:shared] + [-1] * (len(first) - shared)
    assert store.offer(second) == (BLOCK if shared == BLOCK else 0)
    store.close()


@pytest.mark.parametrize(("shared", "offered"), [(256, 0), (512, 512), (1024, 512), (BLOCK, 512)])
def test_the_end_of_a_prompt_serves_what_is_valid_of_it(shared: int, offered: int) -> None:
    """The block of a prompt of 600 tokens holds 512 that have a hash, however much is alike."""
    store = Store(UNIT)
    first = list(range(BLOCK + 1))
    assert store.offer(first[:600]) == 0, "a lookup tells where the prompt ends"
    store.scheduler.advanced(2, 600, hashes(first[:600]))
    span = store.scheduler.wants_save(2)
    assert span is not None
    store.scheduler.save(2, span, [[1]])
    assert store.worker.submit(store.scheduler.end_step(), kvprism.ReadyToken.host())
    report = store.worker.wait(60.0)
    assert report is not None
    store.scheduler.report(report)
    assert store.scheduler.counters()["saved_objects"] == 1
    store.scheduler.finished(2)
    second = first[:shared] + [-1] * (len(first) - shared)
    assert store.offer(second) == offered
    store.close()
