#!/usr/bin/env python3
"""Are the objects of key schema `vllm` the reference's, byte for byte?

Random caches are laid out in real memory, with the views that vLLM gives to a connector. The
reference's own code turns a block into addresses and lengths, kvprism's SegmentMap does the same,
and both are read. Where a StoreWorker accepts the layout the bytes must be equal; where it refuses
they must differ, or the reference must read outside the block or the memory. Whatever is decided,
an object is the block in the order of the layout's letters, and one of schema `kvprism` is that
without the padding of pages. A pipeline stage that holds no layers
of a group saves with a real worker, and the store is compared.

Usage: objects.py [--cases N] [--seed N]
"""

from __future__ import annotations

import argparse
import collections
import itertools
import math
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import kvprism
import reference  # its imports make those of vLLM work without a GPU
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data, worker

BLOCKS = 5
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
FEATURES = (
    "states",
    "padded states",
    "padded attention",
    "compression",
    "several states of a token",
    "a wrapper",
    "members in another order",
    "several tensors",
    "kernel blocks",
    "a group without layers",
)


@dataclass
class Cache:
    """One rank's cache."""

    config: dict[str, Any]
    memories: list[torch.Tensor]  # one for all layers, or one each
    tokens: int  # of a block
    page: int  # bytes of a layer's block
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    tensors: list[kvprism.CacheTensor] = field(default_factory=list)
    features: set[str] = field(default_factory=set)


@dataclass
class Shape:
    """What all groups of a cache share."""

    layout: str
    heads: int
    positions: int
    content: int
    layers: int
    stride: dict[str, int]
    separate: bool  # each layer in an allocation of its own
    kernel: int  # positions of a kernel block; 0: those of a block
    compression: int  # tokens of a position
    states: int  # positions of a token

    @property
    def tokens(self) -> int:
        return self.positions * self.compression // self.states

    @property
    def page(self) -> int:
        return self.heads * self.positions * self.content

    @property
    def head_stride(self) -> int:
        """Heads of LBHNC lie within the kernel's blocks."""
        inside = self.kernel and self.layout == "LBHNC"
        return self.kernel * self.content if inside else self.stride["H"]

    @property
    def splits_heads(self) -> bool:
        return self.layout in ("LHBNC", "BHLNC") and self.heads > 1


def layers_of(group: dict[str, Any]) -> list[str]:
    return [name for member in group.get("members", [group]) for name in member["layers"]]


def group_of(rng: random.Random, shape: Shape, number: int, layers: list[str]) -> dict[str, Any]:
    """A group whose pages are as large as every other's."""
    attention = {
        "kind": "full_attention",
        "layers": layers,
        "block_size": shape.positions,
        "num_kv_heads": shape.heads,
        "head_size": shape.content,
        "head_size_v": 0,
        "dtype": "int8",
        "compression": shape.compression,
        "states_per_token": shape.states,
    }
    roll = rng.random()
    if roll < 0.2 and not shape.splits_heads and not shape.kernel:
        padded = rng.choice((0, 0, 3)) if shape.page > 4 else 0
        first = rng.randrange(1, shape.page - padded)
        row = {
            "kind": "mamba",
            "layers": layers,
            "block_size": shape.tokens,
            "shapes": [[first], [shape.page - padded - first]],
            "dtypes": ["int8", "int8"],
            "mamba_cache_mode": "align",
        }
        return row | ({"page_size_padded": shape.page} if padded else {})
    if roll < 0.3 and shape.content > 1 and not shape.splits_heads and not shape.kernel:
        return attention | {"head_size": shape.content - 1, "page_size_padded": shape.page}
    if roll < 0.45 and len(layers) != 1:
        other = attention | {"head_size": shape.content - 1, "head_size_v": 1}
        members = [attention | {"layers": layers[:1]}, other | {"layers": layers[1:]}]
        if not layers or rng.random() < 0.5:
            return {"kind": "uniform", "members": members}
        # The model's order is not that of the members.
        return {"kind": "uniform", "members": members[::-1], "layers": layers}
    if number % 2 and shape.compression == shape.states:
        return attention | {"kind": "sliding_window", "sliding_window": 8}
    return attention


def padded_head_stride(shape: Shape, group: dict[str, Any]) -> int:
    content = int(group["head_size"])
    return shape.positions * content if shape.layout.endswith("HNC") else content


def head_stride(shape: Shape, group: dict[str, Any]) -> int:
    """Bytes from one head to the next, as a tensor is told; 0 where there are none."""
    if shape.heads == 1 or group["kind"] == "mamba":
        return 0
    padded = "page_size_padded" in group
    return padded_head_stride(shape, group) if padded else shape.head_stride


def view_of(cache: Cache, shape: Shape, group: dict[str, Any], layer: int) -> torch.Tensor:
    """What the engine hands to a connector."""
    memory = cache.memories[layer if shape.separate else 0]
    begin = 0 if shape.separate else layer * shape.stride["L"]
    if group["kind"] == "mamba":  # the first of its states
        (first,) = group["shapes"][0]
        return torch.as_strided(memory, (BLOCKS, first), (shape.stride["B"], 1), begin)
    if "page_size_padded" in group:  # what is valid lies together in front
        content = group["head_size"]
        sizes = (BLOCKS, shape.heads, shape.positions, content)
        head = padded_head_stride(shape, group)
        position = content if shape.layout.endswith("HNC") else shape.heads * content
        return torch.as_strided(memory, sizes, (shape.stride["B"], head, position, 1), begin)
    if not shape.kernel:
        sizes = (BLOCKS, shape.heads, shape.positions, shape.content)
        strides = (shape.stride["B"], shape.stride["H"], shape.stride["N"], 1)
        return torch.as_strided(memory, sizes, strides, begin)
    kernels = shape.positions // shape.kernel
    block = shape.stride["B"] // kernels
    sizes = (BLOCKS * kernels, shape.heads, shape.kernel, shape.content)
    strides = (block, shape.head_stride, shape.stride["N"], 1)
    return torch.as_strided(memory, sizes, strides, begin)


def make(rng: random.Random) -> Cache:
    """Groups that overlay each other in one allocation, as vLLM lays them out, or nearly."""
    layout = rng.choice(LAYOUTS)
    heads, positions, content = rng.choice((1, 2, 3)), rng.choice((2, 4)), rng.choice((2, 3))
    groups = rng.choice((1, 1, 2, 3))
    most = rng.choice((1, 2, 3))
    counts = [most if rng.random() < 0.8 else rng.randrange(1, most + 1) for _ in range(groups)]
    if groups > 1 and rng.random() < 0.3:  # a stage without layers of one of the groups
        counts[rng.randrange(groups)] = 0
    most = max(counts)
    pad = rng.choice((0, 0, 0, 0, 6))  # behind each page, or each row
    tail = rng.choice((0, 0, 0, 32))  # behind everything, as ROCm has it
    separate = layout[0] == "L" and rng.random() < 0.3
    kernel = positions // 2 if layout[0] == "L" and not pad and rng.random() < 0.2 else 0
    stride, step = {}, 1
    size = {"L": most, "B": BLOCKS, "H": heads, "N": positions, "C": content}
    for letter in reversed(layout):
        stride[letter] = step
        step *= size[letter]
        outer = layout[layout.index(letter) - 1]
        if outer == "B" and letter != layout[0]:
            step += pad
    compression, states = rng.choice(((1, 1), (1, 1), (1, 1), (2, 1), (4, 1), (1, 2)))
    shape = Shape(
        layout, heads, positions, content, most, stride, separate, kernel, compression, states
    )
    bytes_each = stride["L"] if separate else step
    memories = [
        torch.tensor([rng.randrange(256) for _ in range(bytes_each + tail)], dtype=torch.uint8)
        for _ in range(most if separate else 1)
    ]
    cache = Cache({}, memories, shape.tokens, shape.page)
    rows = []
    for number, count in enumerate(counts):
        layers = [f"g{number}.{layer}" for layer in range(count)]
        row = group_of(rng, shape, number, layers)
        rows.append(row)
        if not layers:
            cache.features.add("a group without layers")
            continue
        cache.features.add({"mamba": "states", "uniform": "a wrapper"}.get(row["kind"], ""))
        if "members" in row and "layers" in row:
            cache.features.add("members in another order")
        if "page_size_padded" in row:
            states_row = row["kind"] == "mamba"
            cache.features.add("padded states" if states_row else "padded attention")
        for layer, name in enumerate(layers):
            cache.views[name] = view_of(cache, shape, row, layer)
        # One tensor for all layers of the group, or one each.
        apart = separate or rng.random() < 0.2
        if apart and count > 1:
            cache.features.add("several tensors")
        for first in range(count) if apart else (0,):
            memory = memories[first if separate else 0]
            cache.tensors.append(
                kvprism.CacheTensor(
                    memory.data_ptr(),
                    bytes=memory.numel(),
                    offset=0 if separate else first * stride["L"],
                    layers=layers[first : first + 1] if apart else layers,
                    layer_stride=stride["L"],
                    block_stride=stride["B"],
                    head_stride=head_stride(shape, row),
                    kernel_block_size=kernel,
                )
            )
    if kernel:
        cache.features.add("kernel blocks")
    if any(row["kind"] != "mamba" for row in rows):
        cache.features.add("compression" if compression > 1 else "")
        cache.features.add("several states of a token" if states > 1 else "")
    cache.features.discard("")
    cache.config = {
        "num_blocks": BLOCKS,
        "kv_layout": layout,
        "key_schema": "vllm",
        "model_total_kv_heads": heads,
        "parallel": {"pp": 1 if all(counts) else 2},
        "groups": rows,
    }
    # In the order of the model: a layer of each group in turn.
    order = sorted(cache.views, key=lambda name: (int(name.split(".")[1]), name))
    cache.views = {name: cache.views[name] for name in order}
    return cache


def read(cache: Cache, segments: list[tuple[int, int]]) -> bytes | None:
    """The bytes of some addresses; None where they lie outside the memory."""
    out = b""
    for address, length in segments:
        for memory in cache.memories:
            first = address - memory.data_ptr()
            if first >= 0 and first + length <= memory.numel():
                out += bytes(memory[first : first + length].tolist())
                break
        else:
            return None
    return out


def by_letters(cache: Cache, group: int, block: int, *, whole: bool) -> bytes:
    """A block of a group in the order that the letters of the layout's name have without B.

    Of `whole` pages with their padding.
    """
    layout = cache.config["kv_layout"]
    row = cache.config["groups"][group]
    pages = []
    for name in row.get("layers", layers_of(row)):
        view = cache.views[name]
        if row["kind"] == "mamba" or "page_size_padded" in row:
            page = raw_page(cache, view, block)
            pages.append(page if whole else page[: content_of(row)])
            continue
        # Kernel blocks continue the positions.
        parts = view.unflatten(0, (BLOCKS, -1))[block]
        pages.append(torch.cat(list(parts), dim=1).contiguous())
    if not pages:
        return b""
    if pages[0].dim() == 1:
        return bytes(torch.cat(pages).tolist())
    axes = ["LHNC".index(letter) for letter in layout.replace("B", "")]
    return bytes(torch.stack(pages).permute(axes).flatten().tolist())


def content_of(row: dict[str, Any]) -> int:
    """Bytes of a page of one byte's elements that are not padding."""
    if row["kind"] == "mamba":
        return sum(math.prod(shape) for shape in row["shapes"])
    return int(row["num_kv_heads"] * row["block_size"] * row["head_size"])


def raw_page(cache: Cache, view: torch.Tensor, block: int) -> torch.Tensor:
    begin = view.storage_offset() + block * view.stride(0)
    memory = torch.as_strided(view, (cache.page,), (1,), begin)
    return memory.contiguous()


class StartError(Exception):
    """The reference itself does not start with a cache."""


def theirs(cache: Cache, block: int, tokens: int) -> bytes | None:
    """The object that the reference would store of a block; every group's is the same."""
    metadata = data.KeyMetadata("model", 0, 0, 0, 0)
    layout = data.RankLocalStoreLayout(metadata, tokens, tokens)
    views = [worker.group_kernel_blocks(view, BLOCKS) for view in cache.views.values()]
    try:
        layout.register_kv_caches(views, BLOCKS)
    except AssertionError as error:
        raise StartError from error
    addresses, sizes, _ = layout.prepare_values([(0, tokens)], [block], [0])
    return read(cache, list(zip(addresses[0], sizes[0], strict=True)))


def saved(
    cache: Cache,
    schema: kvprism.KeySchema,
    stages: list[kvprism.StoreWorker],
    pool: kvprism.MemoryPool,
) -> dict[tuple[int, int], bytes]:
    """What a save of all blocks leaves of the first stage, by group and block."""
    scheduler = kvprism.StoreScheduler(schema, kvprism.memory_store(pool))
    tokens = (BLOCKS - 1) * cache.tokens
    hashes = [bytes([block]) * 32 for block in range(1, BLOCKS)]
    scheduler.advanced(1, tokens, hashes)
    groups = cache.config["groups"]
    for number, group in enumerate(groups):
        if group["kind"] == "mamba":
            scheduler.boundary(1, kvprism.GroupId(number), BLOCKS - 1, tokens)
    span = scheduler.wants_save(1)
    assert span is not None
    scheduler.save(1, span, [range(1, BLOCKS)] * len(groups))
    plan = scheduler.end_step()
    for stage in stages:
        assert stage.submit(plan, kvprism.ReadyToken.host())
    for stage in itertools.cycle(stages):
        if not scheduler.counters()["ledger"]["alive"]:
            break
        report = stage.wait(10.0)
        assert report is not None, "the worker has nothing to tell"
        scheduler.report(report)
        scheduler.take_released()
    scheduler.close()
    found: dict[tuple[int, int], bytes] = {}
    for number in range(len(groups)):
        for block, key in enumerate(schema.keys(kvprism.StoreIndex(number), hashes), 1):
            value = pool.read(key)
            if value is not None:
                found[number, block] = value
    return found


def compare(cache: Cache, counts: collections.Counter[str]) -> str | None:
    layout = cache.config["kv_layout"]
    projection = kvprism.Projection(kvprism.CacheConfig.from_dict(cache.config))
    places = kvprism.SegmentMap(projection, cache.tensors)
    named_by_us = kvprism.CacheConfig.from_dict(cache.config | {"key_schema": "kvprism"})
    own = kvprism.SegmentMap(kvprism.Projection(named_by_us), cache.tensors)
    store: dict[tuple[int, int], bytes] = {}
    groups = cache.config["groups"]
    empty = {number for number, group in enumerate(groups) if not layers_of(group)}
    try:
        schema = kvprism.KeySchema.vllm(
            projection, model="model", hash_algorithm="sha256", hash_is_stable=True
        )
        pool = kvprism.MemoryPool()
        stages = [
            kvprism.StoreWorker(schema, places, kvprism.memory_store(pool), rank=rank)
            for rank in range(1 + bool(empty))
        ]
        accepted = True
    except kvprism.Error:
        accepted = False
    if accepted:
        if empty:
            store = saved(cache, schema, stages, pool)
        for stage in stages:
            stage.close(1.0)
    verdict = "accepted" if accepted else "refused"
    for number in range(len(groups)):
        for block in range(1, BLOCKS):
            for map_, whole in ((places, True), (own, False)):
                found = read(cache, map_.segments(kvprism.GroupId(number), block))
                if found != by_letters(cache, number, block, whole=whole):
                    what = "with padding" if whole else "without padding"
                    return f"group {number}, block {block} {what} is not in the order of {layout}"
    try:
        wanted = {block: theirs(cache, block, cache.tokens) for block in range(1, BLOCKS)}
    except StartError:
        if accepted:
            return "accepted, and the reference does not start"
        heads = "several heads" if cache.config["model_total_kv_heads"] > 1 else "one head"
        kernel = "kernel blocks" if "kernel blocks" in cache.features else "whole blocks"
        counts[f"no start: {layout}, {heads}, {kernel} {verdict}"] += 1
        return None
    equal = all(
        read(cache, places.segments(kvprism.GroupId(group), block)) == wanted[block]
        for group in range(len(groups))
        if group not in empty
        for block in wanted
    )
    several = "one group" if len(groups) == 1 else "several groups"
    counts[f"{layout} {several} {verdict}"] += 1
    for feature in cache.features:
        counts[f"with {feature} {verdict}"] += 1
    if accepted and not equal:
        return "accepted, and the reference's objects are others"
    if equal and not accepted:
        return "refused, although the reference's objects are ours"
    if accepted and empty:
        if {group for group, _ in store} != set(range(len(groups))):
            return "a save leaves no object of a group"
        for (group, block), value in store.items():
            if value != wanted[block]:
                return f"the saved object of group {group}, block {block} is another"
            counts["saved objects" + (" without layers" if group in empty else "")] += 1
    return None


def work(seed: int, cases: int, most_problems: int) -> tuple[collections.Counter[str], list[str]]:
    """What so many caches are, and what is wrong with the first bad ones."""
    rng = random.Random(seed)
    counts: collections.Counter[str] = collections.Counter()
    problems: list[str] = []
    for _ in range(cases):
        cache = make(rng)
        problem = compare(cache, counts)
        counts["caches"] += 1
        if problem:
            problems.append(f"{problem}\n    {cache.config}\n    {cache.tensors}")
        if len(problems) == most_problems:
            break
    return counts, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    assert reference.interface is not None
    began = time.monotonic()
    counts, problems = work(arguments.seed, arguments.cases, 3)
    for problem in problems:
        print(f"DIFFERENT {problem}")
    for name, count in sorted(counts.items()):
        print(f"{name:<50} {count:>9}")
    for layout in LAYOUTS:
        if not counts[f"{layout} several groups accepted"]:
            problems.append(f"no case of several groups in {layout} was accepted")
            print(problems[-1])
    for feature in FEATURES:
        for verdict in ("accepted", "refused"):
            if not counts[f"with {feature} {verdict}"]:
                problems.append(f"no case with {feature} was {verdict}")
                print(problems[-1])
    if not any(name.startswith("no start: ") for name in counts):
        problems.append("no case with which the reference does not start")
        print(problems[-1])
    refused = sum(n for name, n in counts.items() if name.endswith("refused") and name[1] != "i")
    print(f"{counts['caches']} caches, {refused} of them refused")
    print(f"{len(problems)} differences in objects, {time.monotonic() - began:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
