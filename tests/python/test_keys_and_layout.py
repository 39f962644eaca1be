"""Key schemas and segment maps as Python sees them."""

from __future__ import annotations

import gc
import hashlib
import mmap
import weakref
from multiprocessing import shared_memory
from typing import Any

import kvprism
import numpy as np
import pytest
import store_helpers
from configs import attention, config, mamba, ring
from kvprism import (
    CacheTensor,
    GroupId,
    KeySchema,
    Projection,
    RankPosition,
    SegmentMap,
    StoreIndex,
)

FACTS: dict[str, Any] = {
    "model": "org/model",
    "hash_algorithm": "sha256_cbor",
    "hash_is_stable": True,
}
HASHES = [hashlib.sha256(bytes([i])).digest() for i in range(5)]


def project(*groups: dict[str, Any], **changes: Any) -> Projection:
    return Projection(kvprism.CacheConfig.from_dict(config(*groups, **changes)))


def test_keys_have_the_documented_form() -> None:
    schema = KeySchema.kvprism(project(namespace="team/1"), **FACTS)
    keys = schema.keys(StoreIndex(1), HASHES)
    assert keys == [
        f"kvp1/team%2F1/{schema.fingerprint}/0.0.0.0/1/{digest.hex()}" for digest in HASHES
    ]
    assert (
        schema.keys(StoreIndex(1), np.frombuffer(b"".join(HASHES), np.uint8).reshape(5, 32)) == keys
    )


def test_scheduler_and_ranks_build_the_same_keys() -> None:
    projection = project(parallel={"tp": 2, "pp": 2})
    with pytest.raises(kvprism.ConfigError, match="pipeline_split"):
        KeySchema.kvprism(projection, **FACTS)
    schema = KeySchema.kvprism(projection, **FACTS, pipeline_split="0-2,2-4")
    other = KeySchema.kvprism(projection, **FACTS, pipeline_split="0-1,1-4")
    assert schema.fingerprint != other.fingerprint
    positions = [kvprism.rank_position(rank, projection) for rank in range(4)]
    assert schema.shards(StoreIndex(0)) == positions
    assert positions[3] == RankPosition(tp=1, pp=1)
    keys = [schema.keys(StoreIndex(0), HASHES, shard)[0] for shard in positions]
    assert len(set(keys)) == 4
    with pytest.raises(kvprism.ArgumentError, match="below 4 ranks"):
        kvprism.rank_position(4, projection)


def test_a_split_of_stages_knows_their_layers() -> None:
    first, second = project(parallel={"pp": 2}), project(parallel={"pp": 2}, num_blocks=9)
    split = kvprism.pipeline_split_of([first, second])
    assert split == kvprism.pipeline_split_of([second, first])  # the same layers
    assert split.startswith("2 stages, ")
    KeySchema.kvprism(first, **FACTS, pipeline_split=split)
    with pytest.raises(kvprism.ArgumentError, match=r"stages\[0\].parallel.pp = 2: expected 1"):
        kvprism.pipeline_split_of([first])


def test_an_unstable_hash_is_refused_with_the_remedy() -> None:
    with pytest.raises(kvprism.ConfigError, match="PYTHONHASHSEED"):
        KeySchema.kvprism(project(), **FACTS | {"hash_is_stable": False})
    with pytest.raises(TypeError):
        KeySchema.kvprism(project(), model="m", hash_algorithm="sha256_cbor")  # type: ignore[call-arg]


def test_lone_surrogates_are_named() -> None:
    for found in ("\ud800", "\udc80"):
        with pytest.raises(kvprism.ConfigError) as caught:
            KeySchema.kvprism(project(), **FACTS | {"model": "m" + found, "hash_algorithm": found})
        assert str(caught.value) == (
            "key schema: 2 problems\n  model = byte 1: expected UTF-8 text\n"
            "  hash_algorithm = byte 0: expected UTF-8 text"
        )
    tensor = CacheTensor(np.zeros(16, np.uint8), layers=["\udc80"], block_stride=1)
    assert tensor.layers == ["\udc80"]


def test_short_hashes_and_unknown_shards_are_refused() -> None:
    schema = KeySchema.kvprism(project(), **FACTS)
    with pytest.raises(kvprism.ArgumentError, match="16 to 64 bytes"):
        schema.keys(StoreIndex(0), [b"12345678"])
    with pytest.raises(kvprism.ArgumentError, match="the position of a rank"):
        schema.keys(StoreIndex(0), HASHES, RankPosition(tp=1))
    with pytest.raises(TypeError):
        schema.keys(GroupId(0), HASHES)  # type: ignore[arg-type]


def pool(blocks: int = 16, pitch: int = 409600) -> tuple[np.ndarray, list[CacheTensor]]:
    memory = np.zeros(blocks * pitch, np.uint8)
    layers = (["f0"], ["r0"], ["m0"])
    return memory, [CacheTensor(memory, layers=names, block_stride=pitch) for names in layers]


def test_groups_overlay_one_allocation() -> None:
    memory, tensors = pool()
    segments = SegmentMap(project(), tensors)
    address = memory.__array_interface__["data"][0]
    assert segments.regions == [(address, memory.nbytes, -1)]
    assert segments.object_bytes(StoreIndex(1)) == 512
    assert segments.object_bytes(GroupId(1)) == 4096
    assert segments.segments(GroupId(2), 3) == [(address + 3 * 409600, 512)]
    for block in (0, -1, 16):
        with pytest.raises(kvprism.ArgumentError, match="from 1 to 15"):
            segments.segments(GroupId(2), block)


def test_a_map_keeps_its_memory_alive() -> None:
    memory, tensors = pool()
    watch = weakref.ref(memory)
    segments = SegmentMap(project(), tensors)
    del memory, tensors
    gc.collect()
    assert watch() is not None
    del segments
    gc.collect()
    assert watch() is None


def test_an_address_needs_its_length() -> None:
    memory, _ = pool()
    address = memory.__array_interface__["data"][0]
    tensor = CacheTensor(address, layers=["f0"], block_stride=409600, bytes=memory.nbytes, device=3)
    assert (tensor.address, tensor.bytes, tensor.device) == (address, memory.nbytes, 3)
    with pytest.raises(kvprism.ArgumentError, match="bytes = None"):
        CacheTensor(address, layers=["f0"], block_stride=1)
    with pytest.raises(kvprism.ArgumentError, match="the array knows its length"):
        CacheTensor(memory, layers=["f0"], block_stride=1, bytes=3)


@pytest.mark.parametrize("memory", ["text", 1.5, [1], np.zeros((4, 4), np.uint8)[:, :2]])
def test_memory_that_is_no_allocation_is_refused(memory: Any) -> None:
    with pytest.raises(kvprism.ArgumentError, match="memory"):
        CacheTensor(memory, layers=["f0"], block_stride=1)


def test_a_pool_that_is_too_small_is_refused() -> None:
    _, tensors = pool(blocks=15)
    with pytest.raises(kvprism.ConfigError) as raised:
        SegmentMap(project(), tensors)
    assert len(raised.value.problems) == 3
    assert "at least 6553600 bytes, where block 15 of layer f0 ends" in str(raised.value)


def test_blocks_outermost_are_one_segment_a_block() -> None:
    group = attention(layers=["f0", "f1", "f2"], block_size=4, num_kv_heads=2, head_size=8)
    page = 2 * 4 * 16 * 2
    row = 3 * page + 32
    memory = np.zeros(16 * row, np.uint8)
    address = memory.__array_interface__["data"][0]
    for layout, strides in {
        "BLHNC": {"layer_stride": page},
        "BLNHC": {"layer_stride": page},
        "BHLNC": {"layer_stride": page // 2},
    }.items():
        tensor = CacheTensor(memory, layers=group["layers"], block_stride=row, **strides)
        segments = SegmentMap(project(group, kv_layout=layout), [tensor])
        assert segments.segments(GroupId(0), 5) == [(address + 5 * row, 3 * page)], layout
    tensor = CacheTensor(memory, layers=group["layers"], block_stride=row, layer_stride=page)
    with pytest.raises(kvprism.ConfigError, match="another layout than kv_layout names"):
        SegmentMap(project(group, kv_layout="LBHNC"), [tensor])


def test_a_kernels_blocks_do_not_change_an_object() -> None:
    group = attention(block_size=4, num_kv_heads=2, head_size=8)
    page = 2 * 4 * 16 * 2
    memory = np.zeros(16 * page, np.uint8)
    address = memory.__array_interface__["data"][0]
    tensor = CacheTensor(memory, layers=["f0"], block_stride=page, kernel_block_size=2)
    assert (tensor.kernel_block_size, tensor.head_stride) == (2, 0)
    segments = SegmentMap(project(group), [tensor])
    assert segments.segments(GroupId(0), 1) == [
        (address + page + at, page // 4) for at in (0, page // 2, page // 4, 3 * page // 4)
    ]


def test_tensors_must_be_tensors() -> None:
    with pytest.raises(TypeError, match="CacheTensor"):
        SegmentMap(project(), [1])  # type: ignore[list-item]


def test_kernel_blocks_of_a_large_block() -> None:
    sizes = {"tokens_per_block": 8960, "states_per_block": 64, "count": 17885}
    assert kvprism.kernel_blocks(**sizes, tokens_per_state=4) == (35, 511)
    with pytest.raises(kvprism.ConfigError) as raised:
        kvprism.kernel_blocks(**sizes, tokens_per_state=1)
    assert "17885" in str(raised.value)
    assert "140" in str(raised.value)


def test_projections_outlive_what_they_were_made_of() -> None:
    schema = KeySchema.kvprism(project(attention(), ring(), mamba()), **FACTS)
    gc.collect()
    assert schema.projection.num_groups == 3
    assert schema.projection is schema.projection


@pytest.mark.parametrize("kind", ["bytearray", "mmap", "shared_memory"])
def test_memory_cannot_go_while_it_is_used(kind: str) -> None:
    groups = store_helpers.projection()
    mapped: Any
    if kind == "bytearray":
        mapped = memory = bytearray(4096)
        end = lambda: memory.extend(b"more")  # noqa: E731
    elif kind == "mmap":
        mapped = mmap.mmap(-1, 4096)
        end = mapped.close
    else:
        mapped = shared_memory.SharedMemory(create=True, size=4096)
        mapped.unlink()
        end = mapped.close
    held: Any = CacheTensor(
        mapped.buf if kind == "shared_memory" else mapped,
        layers=list(store_helpers.LAYERS),
        layer_stride=2048,
        block_stride=128,
    )
    with pytest.raises(BufferError):
        end()
    held = SegmentMap(groups, [held])
    with pytest.raises(BufferError):
        end()
    held = kvprism.StoreWorker(store_helpers.schema(groups), held, kvprism.memory_store())
    gc.collect()
    with pytest.raises(BufferError):
        end()
    held.close()
    del held
    gc.collect()
    end()


def test_a_long_value_is_cut_in_messages() -> None:
    with pytest.raises(kvprism.ArgumentError) as raised:
        CacheTensor(b"x" * 100_000, layers=["a"], block_stride=16)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("width", [0, 5, 15, 65, 100])
def test_hashes_of_a_scheduler_have_a_sensible_width(width: int) -> None:
    names = store_helpers.schema(store_helpers.projection())
    store = kvprism.memory_store()
    with pytest.raises(kvprism.ConfigError, match=f"hash_width = {width}: expected 16 to 64 bytes"):
        kvprism.StoreScheduler(names, store, hash_width=width)
    kvprism.StoreScheduler(names, store, hash_width=16)


def test_sizes_of_a_tensor_out_of_range_are_named_at_once() -> None:
    with pytest.raises(kvprism.ArgumentError) as error:
        kvprism.CacheTensor(0, layers=["f0"], block_stride=-1, offset=2**64, bytes=-2)
    assert [(p.path, p.value) for p in error.value.problems] == [
        ("block_stride", "-1"),
        ("offset", "18446744073709551616"),
        ("bytes", "-2"),
    ]
