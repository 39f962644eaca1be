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


@pytest.mark.parametrize("shared", [0, 512, BLOCK - UNIT, BLOCK])
def test_no_more_is_offered_than_is_shared(shared: int) -> None:
    group = configs.attention(
        layers=["f0"], block_size=BLOCK, num_kv_heads=1, head_size=1, dtype="float16"
    )
    groups = kvprism.Projection(
        kvprism.CacheConfig.from_dict(
            configs.config(group, num_blocks=4, hash_block_size=UNIT, scheduler_block_size=BLOCK)
        )
    )
    page = groups.groups()[0].page_size_bytes
    memory = np.ones((1, 4, page), dtype=np.uint8)
    tensor = kvprism.CacheTensor(memory, layers=["f0"], block_stride=page)
    store = kvprism.memory_store()
    names = schema(groups)
    scheduler = kvprism.StoreScheduler(names, store)
    worker = kvprism.StoreWorker(names, kvprism.SegmentMap(groups, [tensor]), store)

    first = list(range(BLOCK + 1))
    scheduler.advanced(1, BLOCK, hashes(first))
    scheduler.save(1, (0, BLOCK), [[1]])
    assert worker.submit(scheduler.end_step(), kvprism.ReadyToken.host())
    report = worker.wait(60.0)
    assert report is not None
    scheduler.report(report)
    assert scheduler.counters()["saved_objects"] == 1

    second = first[:shared] + [-1] * (len(first) - shared)
    offered = scheduler.lookup(2, len(second), hashes(second))
    while offered is None:
        scheduler.end_step()
        offered = scheduler.lookup(2, len(second), hashes(second))
    assert offered == (BLOCK if shared == BLOCK else 0)
    assert worker.close() == 0
    assert scheduler.close() == 0
