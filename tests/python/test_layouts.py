"""Blocks saved from one engine's memory arrive in another's, whatever the layout's strides.

NumPy says where an element lies: memory is the array with its axes in the order of the layout's
letters. kvprism is told strides only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import kvprism
import numpy as np
import numpy.typing as npt
import pytest
from store_helpers import hashes, schema

LAYERS, HEADS, POSITIONS, CONTENT = 3, 2, 4, 6
PAGE = HEADS * POSITIONS * CONTENT
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
Bytes = npt.NDArray[np.uint8]


@dataclass
class Memory:
    """An engine's cache: `logical` is a view of `raw` with axes L, B, H, N, C."""

    raw: Bytes
    logical: Bytes
    tensor: kvprism.CacheTensor


def memory(layout: str, blocks: int, *, pad: int = 0, tail: int = 0, kernel: int = 0) -> Memory:
    """Memory of a layout.

    Args:
        layout: Its letters.
        blocks: Blocks of the pool.
        pad: Bytes after each row of layers, where blocks are outermost.
        tail: Bytes after everything.
        kernel: Positions of a kernel block; 0 for the whole block.
    """
    size = {"L": LAYERS, "B": blocks, "H": HEADS, "N": kernel or POSITIONS, "C": CONTENT}
    size["K"] = POSITIONS // size["N"]
    # Kernel blocks are outside everything else that a page holds.
    outer = "L" if layout in ("BLHNC", "BLNHC") else "B"
    order = layout.replace(outer, outer + "K")
    stride, step = {}, 1
    for letter in reversed(order):
        stride[letter] = step
        step *= size[letter]
        if layout[0] == "B" and order[order.index(letter) - 1] == "B":
            step += pad
    raw = np.zeros(step + tail, np.uint8)
    view = np.lib.stride_tricks.as_strided(
        raw, [size[axis] for axis in "LBHKNC"], [stride[axis] for axis in "LBHKNC"]
    )
    tensor = kvprism.CacheTensor(
        raw,
        layers=[f"layer{i}" for i in range(LAYERS)],
        layer_stride=stride["L"],
        block_stride=stride["B"],
        kernel_block_size=kernel,
    )
    return Memory(raw, view, tensor)


def elements(held: Memory, block: int) -> Bytes:
    """The content of a block, kernel blocks put together: axes L, H, N, C."""
    return held.logical[:, block].reshape(LAYERS, HEADS, POSITIONS, CONTENT)


def project(layout: str, blocks: int) -> kvprism.Projection:
    group = {
        "kind": "full_attention",
        "layers": [f"layer{i}" for i in range(LAYERS)],
        "block_size": POSITIONS,
        "num_kv_heads": HEADS,
        "head_size": CONTENT,
        "head_size_v": 0,
        "dtype": "opaque",
    }
    config: dict[str, Any] = {"num_blocks": blocks, "kv_layout": layout, "groups": [group]}
    return kvprism.Projection(kvprism.CacheConfig.from_dict(config))


class Engine:
    def __init__(self, layout: str, held: Memory, blocks: int, pool: kvprism.MemoryPool) -> None:
        groups = project(layout, blocks)
        keys = schema(groups)
        store = kvprism.memory_store(pool)
        self.scheduler = kvprism.StoreScheduler(keys, store)
        self.worker = kvprism.StoreWorker(keys, kvprism.SegmentMap(groups, [held.tensor]), store)

    def run(self) -> None:
        assert self.worker.submit(self.scheduler.end_step(), kvprism.ReadyToken.host())
        self.scheduler.report(self.worker.wait(10))

    def close(self) -> None:
        assert self.worker.close() == 0
        assert self.scheduler.close() == 0


# What the second engine has other than the first one.
OTHERS: dict[str, dict[str, int]] = {
    "alike": {},
    "padded rows": {"pad": 32},
    "a tail": {"tail": 4096 - 17},
    "smaller kernel blocks": {"kernel": 2},
}


# No kernel splits blocks whose heads lie outside layers.
CASES = [
    (layout, other)
    for layout in LAYOUTS
    for other in OTHERS
    if (layout, other) != ("BHLNC", "smaller kernel blocks")
]


@pytest.mark.parametrize(("layout", "other"), CASES)
def test_blocks_arrive_element_by_element(layout: str, other: str) -> None:
    pool = kvprism.MemoryPool()
    first = memory(layout, 8)
    first.raw[:] = np.random.default_rng(11).integers(1, 256, size=first.raw.shape, dtype=np.uint8)
    before = first.raw.copy()
    tokens = list(range(3 * POSITIONS))
    saver = Engine(layout, first, 8, pool)
    saver.scheduler.advanced(1, len(tokens), hashes(tokens))
    saver.scheduler.save(1, (0, len(tokens)), [[2, 7, 3]])
    saver.run()
    saver.close()
    assert (first.raw == before).all()
    assert [len(pool.read(name)) for name, *_ in pool.objects()] == [LAYERS * PAGE] * 3

    second = memory(layout, 11, **OTHERS[other])
    loader = Engine(layout, second, 11, pool)
    prompt = [*tokens, -1]
    offered = loader.scheduler.lookup(5, len(prompt), hashes(tokens))
    while offered is None:
        loader.scheduler.end_step()
        offered = loader.scheduler.lookup(5, len(prompt), hashes(tokens))
    assert offered == len(tokens)
    loader.scheduler.allocated(5, offered, [[10, 1, 4]])
    loader.run()
    assert [end.complete for end in loader.scheduler.take_load_ends()] == [True]
    for source, target in ((2, 10), (7, 1), (3, 4)):
        assert (elements(second, target) == elements(first, source)).all()
    # Nothing else was written: every byte of the first is not 0.
    assert np.count_nonzero(second.raw) == 3 * LAYERS * PAGE
    loader.close()


def test_an_object_is_the_block_in_the_order_of_the_letters() -> None:
    for layout in LAYOUTS:
        pool = kvprism.MemoryPool()
        held = memory(layout, 4)
        held.raw[:] = np.arange(held.raw.size, dtype=np.uint8)
        engine = Engine(layout, held, 4, pool)
        engine.scheduler.advanced(1, POSITIONS, hashes(list(range(POSITIONS))))
        engine.scheduler.save(1, (0, POSITIONS), [[2]])
        engine.run()
        engine.close()
        ((name, *_),) = pool.objects()
        axes = ["LHNC".index(letter) for letter in layout.replace("B", "")]
        assert pool.read(name) == elements(held, 2).transpose(axes).tobytes(), layout
