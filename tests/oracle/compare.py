#!/usr/bin/env python3
"""Are kvprism's decisions those of vLLM's built-in connector?

Random configurations and existence maps go to the real classes of vLLM 0.32.0 and to kvprism. With
nothing in the engine's own cache the answers must be equal; where they are not meant to be, the
difference is a row of docs/differences.md and is counted under its name. With a local hit ours may
not be shorter, and every chunk of it must be local or in the store.

Usage: compare.py [--cases N] [--seed N] [--jobs N]
"""

from __future__ import annotations

import argparse
import collections
import itertools
import multiprocessing
import random
import sys
import time
from typing import Any

import cases
import kvprism
import numpy as np
from kvprism import HitSearch
from reference import Reference

HASHES = 48
MAPS = 32

Counts = collections.Counter[str]


class MismatchError(Exception):
    """Two answers that differ."""


def hash_bytes(unit: int) -> bytes:
    return unit.to_bytes(32, "big")


def expect(what: str, ours: Any, theirs: Any, **context: Any) -> None:
    if ours != theirs:
        details = "".join(f"\n    {name}: {value}" for name, value in context.items())
        raise MismatchError(f"{what}: ours {ours}, theirs {theirs}{details}")


def check_projection(case: cases.Case, reference: Reference, ours: Any) -> None:
    transfer = [int(ours.group_id(kvprism.TransferIndex(i)))
                for i in range(ours.num_transfer_groups)]
    store = [int(ours.group_id(kvprism.StoreIndex(i))) for i in range(ours.num_store_groups)]
    expect("transfer groups", transfer, list(reference.config.transfer_group_ids))
    expect("store groups", store, list(reference.config.prefix_cacheable_group_ids))


def usable(search: Any, reference: Reference, row: np.ndarray, hit: int, local: int) -> str | None:
    """What a load of `hit` tokens would miss, or None."""
    sizes = reference.block_sizes
    for group, (first, end) in enumerate(search.load_ranges(hit, local)):
        size = sizes[group]
        for chunk in range(first, end):
            last = min((chunk + 1) * size, hit)
            # Any object of this chunk that holds its needed tokens serves.
            units = range(-(-last // reference.unit), (chunk + 1) * size // reference.unit + 1)
            if last == (chunk + 1) * size:
                units = range(last // reference.unit, last // reference.unit + 1)
            if not any(unit <= HASHES and row[group, unit - 1] for unit in units):
                return f"group {group} has no object for chunk {chunk}"
    return None


def compare_hits(
    reference: Reference, search: Any, maps: np.ndarray, rng: random.Random, counts: Counts
) -> None:
    hashes = [hash_bytes(unit) for unit in range(HASHES)]
    total = HASHES * reference.unit
    probed = []
    for _ in range(len(maps)):
        tokens = total if rng.random() < 0.5 else rng.randrange(0, total + 1)
        probed.append(tokens // reference.alignment * reference.alignment)
    zeros = [0] * len(maps)
    flat = maps.reshape(-1)
    ours = search.find_hits(flat, HASHES, locals=zeros, probed=probed)
    theirs = []
    for at, row in enumerate(maps):
        exists = {(int(group), hashes[unit]) for group, unit in zip(*np.nonzero(row), strict=True)}
        theirs.append(reference.find(hashes, exists, probed[at]))
        expect("hit", ours[at], theirs[at], probed=probed[at], map=row.tolist())
        counts["hits"] += 1
        if theirs[at]:
            counts["non-zero hits"] += 1
        missing = usable(search, reference, row, ours[at], 0)
        expect("hit is in the store", missing, None, hit=ours[at], map=row.tolist())

    # With tokens in the engine's own cache.
    locals_ = [
        rng.randrange(0, tokens // reference.step + 1) * reference.step for tokens in probed
    ]
    with_local = search.find_hits(flat, HASHES, locals=locals_, probed=probed)
    for at, row in enumerate(maps):
        local, hit = locals_[at], with_local[at]
        if hit < theirs[at] or hit < local:
            raise MismatchError(
                f"local {local}: hit {hit} is shorter than {theirs[at]}\n    map: {row.tolist()}"
            )
        missing = usable(search, reference, row, hit, local)
        expect("hit is local or in the store", missing, None, hit=hit, local=local)
        counts["hits with a local one"] += 1


def compare_masks(
    reference: Reference, search: Any, hits: list[int], rng: random.Random, counts: Counts
) -> None:
    hashes = [hash_bytes(unit) for unit in range(HASHES)]
    sizes = reference.block_sizes
    coordinator = reference.coordinator
    total = HASHES * reference.unit
    for hit in hits:
        theirs = coordinator.load_mask(hashes, hit)
        ours = search.load_ranges(hit)
        for group, size in enumerate(sizes):
            first, end = ours[group]
            row = [first <= chunk < end for chunk in range(-(-hit // size))]
            mask = list(theirs[group])
            mask += [False] * (len(row) - len(mask))
            expect("load mask", row, mask, group=group, hit=hit)
        counts["load masks"] += 1
    for _ in range(2):
        tokens = rng.randrange(0, total // reference.step + 1) * reference.step
        start = rng.randrange(0, tokens + 1)
        theirs_lookup = coordinator.lookup_mask(tokens)
        for group, mask in enumerate(search.lookup_masks(tokens)):
            wanted = theirs_lookup[group]
            row = [bool(each) for each in mask]
            expect("lookup mask", row, [True] * len(row) if wanted is None else list(wanted),
                   group=group, tokens=tokens)
        counts["lookup masks"] += 1
        for retention in (None, 0, reference.step, 2 * reference.step):
            coordinator.retention_interval = retention
            prompt = rng.randrange(1, total + 1) if rng.random() < 0.8 else None
            theirs_store = coordinator.store_mask(tokens, start, prompt)
            ours_store = search.store_masks(
                tokens, start, retention=retention, prompt_tokens=prompt
            )
            for group, mask in enumerate(ours_store):
                if group in coordinator.mamba_group_ids:
                    expect("states are saved by hand-off", any(theirs_store[group]), False)
                    continue
                wanted = theirs_store[group]
                row = [bool(each) for each in mask]
                expect("store mask", row, [True] * len(row) if wanted is None else list(wanted),
                       group=group, tokens=tokens, start=start, retention=retention, prompt=prompt)
            counts["store masks"] += 1


def compare(case: cases.Case, rng: random.Random, numbers: np.random.Generator,
            counts: Counts) -> None:
    reference = Reference(
        case.config, prefix_match_unit=case.prefix_match_unit, use_eagle=case.use_eagle
    )
    if not reference.groups:
        return
    config = dict(
        case.config,
        scheduler_block_size=reference.step,
        hash_block_size=reference.unit,
    )
    projection = kvprism.Projection(kvprism.CacheConfig.from_dict(config))
    check_projection(case, reference, projection)
    search = HitSearch(projection)
    expect("step", search.step, reference.step)
    expect("unit", search.unit, reference.unit)
    expect("alignment", search.alignment, reference.alignment)
    rows = [
        (size // reference.unit, int(reference.alignment < size))
        for size in reference.block_sizes
    ]
    maps = cases.existence(numbers, MAPS, rows, HASHES)
    compare_hits(reference, search, maps, rng, counts)
    total = HASHES * reference.unit
    hits = [rng.randrange(0, total // reference.alignment + 1) * reference.alignment
            for _ in range(4)]
    compare_masks(reference, search, hits, rng, counts)
    for trait in case.traits:
        counts[f"with {trait}"] += MAPS
    counts["with partial hits" if reference.alignment < reference.step else "whole blocks"] += MAPS
    for pair in itertools.combinations_with_replacement(sorted(set(case.kinds)), 2):
        counts[f"pair {pair[0]} + {pair[1]}"] += MAPS


def work(job: tuple[int, int]) -> tuple[Counts, list[str]]:
    seed, wanted = job
    rng = random.Random(seed)
    numbers = np.random.default_rng(seed)
    counts: Counts = collections.Counter()
    problems: list[str] = []
    known = set(kvprism.SpecRegistry.builtin().names())
    while counts["hits"] < wanted and len(problems) < 3:
        case = cases.make(rng, known=known)
        try:
            compare(case, rng, numbers, counts)
        except MismatchError as problem:
            problems.append(f"{problem}\n    config: {case}")
    return counts, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    began = time.monotonic()
    shares = [
        (arguments.seed * 1000 + job, -(-arguments.cases // arguments.jobs))
        for job in range(arguments.jobs)
    ]
    if arguments.jobs == 1:
        results = [work(shares[0])]
    else:
        with multiprocessing.get_context("fork").Pool(arguments.jobs) as pool:
            results = pool.map(work, shares, chunksize=1)
    counts: Counts = collections.Counter()
    problems: list[str] = []
    for part, found in results:
        counts.update(part)
        problems += found
    for name, count in sorted(counts.items()):
        print(f"{name:<50} {count:>9}")
    for problem in problems:
        print(f"DIFFERENT {problem}")
    print(f"{len(problems)} differences, {time.monotonic() - began:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
