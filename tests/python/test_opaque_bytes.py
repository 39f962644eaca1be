"""Rows that only the engine can read move bit for bit (R15)."""

from __future__ import annotations

import configs
import kvprism
import numpy as np
from store_helpers import schema

BLOCKS, POSITIONS = 6, 4
# A position and the key that belongs to it, next to each other.
ROW = np.dtype([("position", "<i8"), ("key", "<f2", (8,))])


def groups() -> kvprism.Projection:
    opaque = {
        "num_kv_heads": 1,
        "head_size": ROW.itemsize,
        "head_size_v": 0,
        "dtype": "opaque",
        "block_size": POSITIONS,
    }
    rows = configs.attention(layers=["f0"], **opaque)
    ring = configs.ring(layers=["r0"]) | opaque
    config = configs.config(rows, ring, num_blocks=2 * BLOCKS)
    return kvprism.Projection(kvprism.CacheConfig.from_dict(config))


def worker(
    projection: kvprism.Projection, pool: kvprism.MemoryPool, memory: np.ndarray
) -> kvprism.StoreWorker:
    pitch = POSITIONS * ROW.itemsize
    tensors = [
        kvprism.CacheTensor(memory, layers=[layer], block_stride=pitch) for layer in ("f0", "r0")
    ]
    places = kvprism.SegmentMap(projection, tensors)
    return kvprism.StoreWorker(schema(projection), places, kvprism.memory_store(pool))


def run(
    scheduler: kvprism.StoreScheduler, one: kvprism.StoreWorker, plan: kvprism.StepPlan
) -> None:
    assert one.submit(plan, kvprism.ReadyToken.host())
    while scheduler.counters()["ledger"]["alive"]:
        report = one.wait(60.0)
        assert report is not None
        scheduler.report(report)
        scheduler.take_released()


def test_rows_of_integers_and_halves_come_back_bit_for_bit() -> None:
    projection = groups()
    assert projection.num_transfer_groups == 2
    assert projection.num_store_groups == 1
    bits = np.random.default_rng(15)
    size = 2 * BLOCKS * POSITIONS * ROW.itemsize
    before = bits.integers(0, 256, size, dtype=np.uint8)
    rows = before.view(ROW).reshape(2 * BLOCKS, POSITIONS)
    # What any conversion would change: positions beyond a float's, and halves that are no numbers.
    rows["position"][1:BLOCKS] = np.iinfo(np.int64).max - np.arange(POSITIONS)
    rows["key"][1:BLOCKS, :, 0].view("<u2")[...] = 0x7C01  # a signalling NaN
    rows["key"][1:BLOCKS, :, 1].view("<u2")[...] = 0x8000  # minus zero
    after = np.zeros(size, np.uint8)

    pool = kvprism.MemoryPool()
    hashes = [bytes([number]) * 32 for number in range(1, BLOCKS)]
    tokens = (BLOCKS - 1) * POSITIONS
    scheduler = kvprism.StoreScheduler(schema(projection), kvprism.memory_store(pool))
    first, second = (worker(projection, pool, memory) for memory in (before, after))
    scheduler.advanced(1, tokens, hashes)
    scheduler.save(1, (0, tokens), [range(1, BLOCKS), [BLOCKS]])
    run(scheduler, first, scheduler.end_step())
    assert scheduler.counters()["saved_objects"] == BLOCKS - 1, "and nothing of the ring"

    offered = scheduler.lookup(2, tokens + 1, hashes)
    while offered is None:
        scheduler.end_step()
        offered = scheduler.lookup(2, tokens + 1, hashes)
    assert offered == tokens
    assert scheduler.allocated(2, offered, [range(1, BLOCKS), [BLOCKS]]) is not None
    run(scheduler, second, scheduler.end_step())
    page = POSITIONS * ROW.itemsize
    assert after[page : BLOCKS * page].tobytes() == before[page : BLOCKS * page].tobytes()
    assert not after[BLOCKS * page :].any(), "the ring's block is not written"
    for one in (first, second):
        assert one.close() == 0
    assert scheduler.close() == 0
