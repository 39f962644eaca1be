#!/usr/bin/env python3
"""Are the objects of key schema `vllm` the reference's, byte for byte?

Random caches are laid out in real memory, with the views that vLLM gives to a connector. The
reference's own code turns a block into addresses and lengths, kvprism's SegmentMap does the same,
and both are read. Where a StoreWorker accepts the layout the bytes must be equal; where it refuses
they must differ, or the reference must read outside the block or the memory.

Usage: objects.py [--cases N] [--seed N]
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import kvprism
import reference  # its imports make those of vLLM work without a GPU
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data

BLOCKS = 5
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@dataclass
class Cache:
    """One rank's cache."""

    config: dict[str, Any]
    memory: torch.Tensor
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    tensors: list[kvprism.CacheTensor] = field(default_factory=list)


def make(rng: random.Random) -> Cache:
    """Groups that overlay each other in one allocation, as vLLM lays them out, or nearly."""
    layout = rng.choice(LAYOUTS)
    heads, positions, content = rng.choice((1, 2, 3)), rng.choice((2, 4)), rng.choice((2, 3))
    groups = rng.choice((1, 1, 2, 3))
    most = rng.choice((1, 2, 3))
    counts = [most if rng.random() < 0.8 else rng.randrange(1, most + 1) for _ in range(groups)]
    most = max(counts)
    pad = rng.choice((0, 0, 0, 0, 6))  # behind each page, or each row
    tail = rng.choice((0, 0, 0, 32))  # behind everything, as ROCm has it
    stride, step = {}, 1
    size = {"L": most, "B": BLOCKS, "H": heads, "N": positions, "C": content}
    for letter in reversed(layout):
        stride[letter] = step
        step *= size[letter]
        outer = layout[layout.index(letter) - 1]
        if outer == "B" and letter != layout[0]:
            step += pad
    memory = torch.tensor([rng.randrange(256) for _ in range(step + tail)], dtype=torch.uint8)
    cache = Cache({}, memory)
    rows = []
    for number, count in enumerate(counts):
        layers = [f"g{number}.{layer}" for layer in range(count)]
        window = {"sliding_window": 8} if number % 2 else {}
        rows.append(
            {
                "kind": "sliding_window" if number % 2 else "full_attention",
                "layers": layers,
                "block_size": positions,
                "num_kv_heads": heads,
                "head_size": content,
                "head_size_v": 0,
                "dtype": "int8",
                **window,
            }
        )
        for layer, name in enumerate(layers):
            cache.views[name] = torch.as_strided(
                memory,
                (BLOCKS, heads, positions, content),
                (stride["B"], stride["H"], stride["N"], 1),
                layer * stride["L"],
            )
        cache.tensors.append(
            kvprism.CacheTensor(
                memory.data_ptr(),
                bytes=memory.numel(),
                layers=layers,
                layer_stride=stride["L"],
                block_stride=stride["B"],
                head_stride=stride["H"] if heads > 1 else 0,
            )
        )
    cache.config = {
        "num_blocks": BLOCKS,
        "kv_layout": layout,
        "key_schema": "vllm",
        "model_total_kv_heads": heads,
        "groups": rows,
    }
    # In the order of the model: a layer of each group in turn.
    order = sorted(cache.views, key=lambda name: (int(name.split(".")[1]), name))
    cache.views = {name: cache.views[name] for name in order}
    return cache


def read(memory: torch.Tensor, segments: list[tuple[int, int]]) -> bytes | None:
    """The bytes of some addresses; None where they lie outside the memory."""
    base, out = memory.data_ptr(), b""
    for address, length in segments:
        first = address - base
        if first < 0 or first + length > memory.numel():
            return None
        out += bytes(memory[first : first + length].tolist())
    return out


def theirs(cache: Cache, block: int, tokens: int) -> bytes | None:
    """The object that the reference would store of a block; every group's is the same."""
    metadata = data.KeyMetadata("model", 0, 0, 0, 0)
    layout = data.RankLocalStoreLayout(metadata, tokens, tokens)
    layout.register_kv_caches(list(cache.views.values()), BLOCKS)
    addresses, sizes, _ = layout.prepare_values([(0, tokens)], [block], [0])
    return read(cache.memory, list(zip(addresses[0], sizes[0], strict=True)))


def compare(cache: Cache, counts: collections.Counter[str]) -> str | None:
    layout = cache.config["kv_layout"]
    projection = kvprism.Projection(kvprism.CacheConfig.from_dict(cache.config))
    places = kvprism.SegmentMap(projection, cache.tensors)
    try:
        schema = kvprism.KeySchema.vllm(
            projection, model="model", hash_algorithm="sha256", hash_is_stable=True
        )
        store = kvprism.memory_store(kvprism.MemoryPool())
        kvprism.StoreWorker(schema, places, store).close(1.0)
        accepted = True
    except kvprism.Error:
        accepted = False
    tokens = cache.config["groups"][0]["block_size"]
    equal = all(
        read(cache.memory, places.segments(kvprism.GroupId(group), block))
        == theirs(cache, block, tokens)
        for group in range(len(cache.config["groups"]))
        for block in range(1, BLOCKS)
    )
    groups = "one group" if len(cache.config["groups"]) == 1 else "several groups"
    verdict = "accepted" if accepted else "refused"
    counts[f"{layout} {groups} {verdict}"] += 1
    if accepted and not equal:
        return "accepted, and the reference's objects are others"
    if equal and not accepted:
        # One layer or head makes its letter meaningless; the name is refused all the same.
        if layout == "BHLNC":
            counts["refused by the name of the layout alone"] += 1
            return None
        return "refused, although the reference's objects are ours"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    assert reference.interface is not None
    began = time.monotonic()
    rng = random.Random(arguments.seed)
    counts: collections.Counter[str] = collections.Counter()
    problems = 0
    for _ in range(arguments.cases):
        cache = make(rng)
        problem = compare(cache, counts)
        if problem and problems < 3:
            print(f"DIFFERENT {problem}\n    {cache.config}\n    {cache.tensors}")
        problems += bool(problem)
    for name, count in sorted(counts.items()):
        print(f"{name:<50} {count:>9}")
    for layout in LAYOUTS[:5]:
        if not counts[f"{layout} several groups accepted"]:
            print(f"no case of several groups in {layout} was accepted")
            problems += 1
    print(f"{problems} differences in objects, {time.monotonic() - began:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
