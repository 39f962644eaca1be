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

import block_hashes
import cases
import kvprism
import numpy as np
from kvprism import HitSearch
from reference import Reference

HASHES = 48
MAPS = 32
HASHED_REQUESTS = 400

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
    transfer = [
        int(ours.group_id(kvprism.TransferIndex(i))) for i in range(ours.num_transfer_groups)
    ]
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


def one_token_windows(search: Any) -> list[int]:
    return [
        at for at, group in enumerate(search.groups) if group.rule == "window" and group.window == 1
    ]


def uneven_chunks(search: Any) -> bool:
    return any(
        group.rule == "chunk" and group.window % group.chunk_tokens for group in search.groups
    )


def known_difference(
    search: Any, reference: Reference, row: np.ndarray, ours: int, theirs: int
) -> str | None:
    """The row of docs/differences.md that explains two unequal hits."""
    if any(search.groups[at].draft for at in one_token_windows(search)):
        return "D1"
    if ours > theirs:
        return None
    if usable(search, reference, row, theirs, 0) is None:
        return None
    if uneven_chunks(search):
        return "D2"
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
        counts["hits"] += 1
        if ours[at] != theirs[at]:
            known = known_difference(search, reference, row, ours[at], theirs[at])
            if known is None:
                expect("hit", ours[at], theirs[at], probed=probed[at], map=row.tolist())
            counts[f"difference {known}"] += 1
        if theirs[at]:
            counts["non-zero hits"] += 1
        missing = usable(search, reference, row, ours[at], 0)
        expect("hit is in the store", missing, None, hit=ours[at], map=row.tolist())

    # With tokens in the engine's own cache.
    locals_ = [rng.randrange(0, tokens // reference.step + 1) * reference.step for tokens in probed]
    with_local = search.find_hits(flat, HASHES, locals=locals_, probed=probed)
    for at, row in enumerate(maps):
        local, hit = locals_[at], with_local[at]
        if hit < ours[at] or hit < local:
            raise MismatchError(
                f"local {local}: hit {hit} is shorter than {ours[at]}\n    map: {row.tolist()}"
            )
        missing = usable(search, reference, row, hit, local)
        expect("hit is local or in the store", missing, None, hit=hit, local=local)
        counts["hits with a local one"] += 1


def shared_prefix(search: Any, reference: Reference, row: np.ndarray, probed: int) -> int:
    """By its definition: whole steps of which every group that needs all of a prefix has all."""
    groups = [at for at, group in enumerate(search.groups) if group.rule == "prefix"]
    tokens = 0
    for end in range(search.step, probed + 1, search.step) if groups else ():
        for group in groups:
            scale = reference.block_sizes[group] // reference.unit
            if not row[group, : end // reference.unit][scale - 1 :: scale].all():
                return tokens
        tokens = end
    return tokens


def compare_shared_prefixes(
    reference: Reference, search: Any, maps: np.ndarray, rng: random.Random, counts: Counts
) -> None:
    """Where a prompt leaves others (D16), with its definition: the reference has no such rule."""
    total = HASHES * reference.unit
    probed = [rng.randrange(0, total // reference.step + 1) * reference.step for _ in maps]
    ours = search.shared_prefixes(maps.reshape(-1), HASHES, locals=[0] * len(maps), probed=probed)
    for at, row in enumerate(maps):
        wanted = shared_prefix(search, reference, row, probed[at])
        expect("shared prefix", ours[at], wanted, probed=probed[at], map=row.tolist())
        counts["shared prefixes"] += 1


def compare_masks(
    reference: Reference, search: Any, hits: list[int], rng: random.Random, counts: Counts
) -> None:
    hashes = [hash_bytes(unit) for unit in range(HASHES)]
    sizes = reference.block_sizes
    one_token = one_token_windows(search)
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
            if group in one_token:
                continue
            wanted = theirs_lookup[group]
            row = [bool(each) for each in mask]
            expect(
                "lookup mask",
                row,
                [True] * len(row) if wanted is None else list(wanted),
                group=group,
                tokens=tokens,
            )
        counts["lookup masks"] += 1
        for retention in (None, 0, reference.step, 2 * reference.step):
            coordinator.retention_interval = retention
            prompt = rng.randrange(1, total + 1) if rng.random() < 0.8 else None
            theirs_store = coordinator.store_mask(tokens, start, prompt)
            ours_store = search.store_masks(
                tokens, start, retention=retention, prompt_tokens=prompt
            )
            for group, mask in enumerate(ours_store):
                if group in one_token:
                    counts["difference D1 in a mask"] += 1
                    continue
                if group in coordinator.mamba_group_ids:
                    expect("states are saved by hand-off", any(theirs_store[group]), False)
                    continue
                wanted = theirs_store[group]
                row = [bool(each) for each in mask]
                expect(
                    "store mask",
                    row,
                    [True] * len(row) if wanted is None else list(wanted),
                    group=group,
                    tokens=tokens,
                    start=start,
                    retention=retention,
                    prompt=prompt,
                )
            counts["store masks"] += 1


def compare_prompt_ends(
    reference: Reference, search: Any, rng: random.Random, counts: Counts
) -> None:
    """What the end of a prompt leaves in the store where hits may end inside a block."""
    hashes = [hash_bytes(unit) for unit in range(HASHES)]
    if reference.alignment == reference.step:
        expect("end of a prompt", search.prompt_end_chunks(HASHES * reference.unit - 1), [])
        return
    for _ in range(8):
        prompt = rng.randrange(1, HASHES * reference.unit + 1)
        ours = search.prompt_end_chunks(prompt)
        expect("end of a prompt", ours, reference.prompt_tail(hashes, prompt), prompt=prompt)
        counts["ends of prompts"] += 1


def reachable(search: Any, reference: Reference, row: np.ndarray, tokens: int) -> np.ndarray:
    """What a lookup of `tokens` sees of a map: without partial hits only chunks that can serve."""
    seen = np.zeros_like(row)
    limit = tokens // reference.unit
    if reference.alignment < reference.step:
        seen[:, :limit] = row[:, :limit]
        return seen
    for group, mask in enumerate(search.lookup_masks(tokens)):
        scale = reference.block_sizes[group] // reference.unit
        for chunk, keep in enumerate(mask):
            unit = (chunk + 1) * scale - 1
            seen[group, unit] = row[group, unit] if keep else 0
    return seen


def compare_lookups(
    reference: Reference,
    schema: Any,
    search: Any,
    maps: np.ndarray,
    rng: random.Random,
    counts: Counts,
) -> None:
    """The whole way of a lookup: which keys are asked for, what the answer means, tail objects."""
    if one_token_windows(search):
        return
    hashes = [hash_bytes(unit) for unit in range(HASHES)]
    one = reference.worker_of()
    indices = [kvprism.StoreIndex(group) for group in range(len(reference.groups))]
    for row in maps:
        present = {
            key
            for group, index in enumerate(indices)
            for shard in schema.shards(index)
            for key in schema.keys(
                index, [hashes[unit] for unit in np.flatnonzero(row[group])] or [], shard
            )
        }
        tokens = rng.randrange(1, HASHES * reference.unit + 1)
        probed = tokens // reference.alignment * reference.alignment
        limit = (tokens - 1) // reference.alignment * reference.alignment
        seen = reachable(search, reference, row, probed)
        ours = search.find_hits(
            seen.reshape(-1), HASHES, locals=[0], probed=[probed], limits=[limit]
        )[0]
        counts["lookups"] += 1
        try:
            answer = reference.lookup(one, hashes, present, tokens)
        except AssertionError:
            # A hit that needs no object at its end stops the reference's server.
            tails = search.tails(seen.reshape(-1), HASHES, hits=[ours])
            if uneven_chunks(search):
                counts["difference D2 in a lookup"] += 1
            elif any(
                tail == 0 and group.rule == "chunk"
                for tail, group in zip(tails, search.groups, strict=True)
            ):
                counts["difference D5"] += 1
            else:
                raise MismatchError("the reference asserts in a lookup") from None
            continue
        if ours != answer.hit_length:
            known = known_difference(search, reference, seen, ours, answer.hit_length)
            if known is None:
                expect("lookup", ours, answer.hit_length, tokens=tokens, map=row.tolist())
            counts[f"difference {known} in a lookup"] += 1
            continue
        if ours:
            tails = search.tails(seen.reshape(-1), HASHES, hits=[ours])
            theirs = [boundary.num_tokens for boundary in answer.tail_key_boundaries]
            ranges = search.load_ranges(ours)
            for group, (first, end) in enumerate(ranges):
                # Where nothing is loaded, no object ends the hit; the reference names one anyway.
                wanted = theirs[group] if end > first else 0
                expect("tail object", tails[group], wanted, hit=ours, group=group)


def compare_keys(reference: Reference, schema: Any, rng: random.Random, counts: Counts) -> None:
    hashes = [hash_bytes(unit) for unit in range(HASHES)]
    parallel = reference.parallel
    hash_ = hashes[rng.randrange(HASHES)]
    ranks = [
        (tp, pcp, tp % parallel["dcp"], pp)
        for pp in range(parallel["pp"])
        for pcp in range(parallel["pcp"])
        for tp in range(parallel["tp"])
    ]
    for at in rng.sample(range(len(ranks)), min(3, len(ranks))):
        tp, pcp, dcp, pp = ranks[at]
        one = reference.worker_of(tp=tp, pcp=pcp, dcp=dcp, pp=pp)
        position = kvprism.rank_position(at, schema.projection)
        expect(
            "position", (position.tp, position.pcp, position.dcp, position.pp), (tp, pcp, dcp, pp)
        )
        for group, database in enumerate(one.token_dbs):
            index = kvprism.StoreIndex(group)
            ours = schema.keys(index, [hash_], schema.shard_of(index, position))
            expect("key", ours, [database.key_for(hash_)])
            namespaces = {
                schema.keys(index, [hash_], shard)[0].rsplit("@", 1)[0]
                for shard in schema.shards(index)
            }
            expect("namespaces", namespaces, set(one._lookup_key_prefixes[group]))
            factor = one.group_tp_replication_factors[group]
            total = HASHES * reference.unit // reference.step * reference.step
            theirs = [
                start // database.block_size
                for start, _, _ in database.process_tokens(
                    total, hashes, put_step=factor, put_step_rank=(tp + group) % factor
                )
            ]
            chunks = range(-(-total // database.block_size))
            stored = [chunk for chunk in chunks if schema.stores(index, position, chunk)]
            expect("striping", stored, theirs, group=group, rank=at)
        counts["key sets"] += 1


def key_schema(case: cases.Case, projection: Any, reference: Reference, counts: Counts) -> Any:
    """Schema `vllm`, or None where it is refused."""
    wrong = false_replicas(case, reference)
    try:
        schema = kvprism.KeySchema.vllm(
            projection,
            model=reference.model,
            hash_algorithm="sha256",
            hash_is_stable=True,
        )
    except kvprism.ConfigError as error:
        if not wrong:
            raise MismatchError(f"refused: {error}") from None
        counts["difference D8"] += 1
        return None
    expect("accepted although ranks hold different heads", wrong, False)
    return schema


def false_replicas(case: cases.Case, reference: Reference) -> bool:
    """Whether ranks that share a key in the reference hold different heads."""
    factors = reference.worker_of().group_tp_replication_factors
    tp = reference.parallel["tp"]
    for group, factor in zip(reference.config.prefix_cacheable_group_ids, factors, strict=True):
        config = case.config["groups"][group]
        for member in config.get("members", [config]):
            if member["kind"] == "mamba" or "mla" in member["kind"]:
                continue
            total = member["total_num_kv_heads"]
            heads = [
                {(rank * total // tp) + head for head in range(member["num_kv_heads"])}
                for rank in range(tp)
            ]
            for first in range(0, tp, factor):
                if any(heads[rank] != heads[first] for rank in range(first, first + factor)):
                    return True
    return False


def rules_of(projection: Any) -> list[tuple[Any, ...]]:
    """Without draft flags, on which only the scheduler acts."""
    return [
        (group.rule, group.chunk_tokens, group.window, group.unit_tokens)
        for group in HitSearch(projection).groups
    ]


def stage_of(group: dict[str, Any], stage: int, cut: int) -> dict[str, Any]:
    """A group's part on one of two stages; a cut at either end leaves one of them nothing."""
    if "members" in group:
        members = group["members"]
        if 0 < cut < 3:
            return dict(group, members=[members[stage]])
        if (cut == 0) == (stage == 0):
            members = [dict(member, layers=[]) for member in members]
        return dict(group, members=members)
    layers = group["layers"]
    return dict(group, layers=layers[:cut] if stage == 0 else layers[cut:])


def layers_of(group: dict[str, Any]) -> list[str]:
    return [layer for member in group.get("members", [group]) for layer in member["layers"]]


def compare_stages(
    config: dict[str, Any],
    reference: Reference,
    accepted: bool,
    rng: random.Random,
    counts: Counts,
) -> None:
    """Pipeline stages that hold unequal parts of each group, or none, decide alike."""
    cuts = [rng.randrange(4) for _ in config["groups"]]
    projections = []
    held: list[list[int]] = [[] for _ in cuts]
    for stage in range(2):
        groups = [
            stage_of(group, stage, cut) for group, cut in zip(config["groups"], cuts, strict=True)
        ]
        ours = kvprism.Projection(kvprism.CacheConfig.from_dict(dict(config, groups=groups)))
        projections.append(ours)
        names = {layer for group in groups for layer in layers_of(group)}
        for number, group in enumerate(groups):
            if layers_of(group):
                held[number].append(stage)
        store = [int(ours.group_id(kvprism.StoreIndex(i))) for i in range(ours.num_store_groups)]
        theirs = reference.stage_groups(names)
        if any(
            not group.get("enable_kv_transfer", True)
            and group["kind"] != "circular_buffer"
            and len(layers_of(group)) < len(layers_of(whole))
            for group, whole in zip(groups, config["groups"], strict=True)
        ):
            # The reference forgets this word on a stage that holds part of a group, or none.
            expect("D9", store != theirs, True)
            counts["difference D9"] += 1
        else:
            expect("store groups of a stage", store, theirs)
    first, second = projections
    counts["pairs of stages"] += 1
    if any(len(stages) < 2 for stages in held):
        counts["pairs of stages, one without layers of a group"] += 1
    expect("digest of a stage", first.digest, second.digest)
    # A stage sees its own first layer of a wrapper, so which specs are equal is not compared.
    expect("groups of a stage", rules_of(first), rules_of(second))
    if not accepted:
        return
    # The reference asks every stage for an object of every group, whoever holds its layers.
    told = [
        dict(stage_of(group, 0, cut), pipeline_stages=stages)
        for group, cut, stages in zip(config["groups"], cuts, held, strict=True)
    ]
    schema = kvprism.KeySchema.vllm(
        kvprism.Projection(kvprism.CacheConfig.from_dict(dict(config, groups=told))),
        model=reference.model,
        hash_algorithm="sha256",
        hash_is_stable=True,
    )
    one = reference.worker_of()
    for group, prefixes in enumerate(one._lookup_key_prefixes):
        index = kvprism.StoreIndex(group)
        namespaces = {
            schema.keys(index, [hash_bytes(0)], shard)[0].rsplit("@", 1)[0]
            for shard in schema.shards(index)
        }
        expect("namespaces of all stages", namespaces, set(prefixes), group=group)


def compare(
    case: cases.Case, rng: random.Random, numbers: np.random.Generator, counts: Counts
) -> None:
    reference = Reference(
        case.config,
        prefix_match_unit=case.prefix_match_unit,
        use_eagle=case.use_eagle,
        model=rng.choice(("model", "org/model", "/models/org/model/")),
        cache_prefix=rng.choice(("", "tenant", "a@b")),
        model_total_kv_heads=case.model_total_kv_heads,
    )
    if not reference.groups:
        return
    config = dict(
        case.config,
        scheduler_block_size=reference.step,
        hash_block_size=reference.unit,
        cache_hit_alignment_tokens=reference.alignment,
        use_eagle=case.use_eagle,
        key_schema="vllm",
        namespace=reference.cache_prefix,
        model_total_kv_heads=case.model_total_kv_heads,
    )
    projection = kvprism.Projection(kvprism.CacheConfig.from_dict(config))
    check_projection(case, reference, projection)
    search = HitSearch(projection)
    expect("step", search.step, reference.step)
    expect("unit", search.unit, reference.unit)
    expect("alignment", search.alignment, reference.alignment)
    rows = [
        (size // reference.unit, int(reference.alignment < size)) for size in reference.block_sizes
    ]
    maps = cases.existence(numbers, MAPS, rows, HASHES)
    compare_hits(reference, search, maps, rng, counts)
    compare_shared_prefixes(reference, search, maps, rng, counts)
    schema = key_schema(case, projection, reference, counts)
    if schema is not None:
        compare_keys(reference, schema, rng, counts)
        compare_lookups(reference, schema, search, maps[:4], rng, counts)
    if reference.parallel["pp"] == 2:
        compare_stages(config, reference, schema is not None, rng, counts)
    total = HASHES * reference.unit
    hits = [
        rng.randrange(0, total // reference.alignment + 1) * reference.alignment for _ in range(4)
    ]
    compare_masks(reference, search, hits, rng, counts)
    compare_prompt_ends(reference, search, rng, counts)
    for trait in case.traits:
        counts[f"with {trait}"] += MAPS
    counts["with partial hits" if reference.alignment < reference.step else "whole blocks"] += MAPS
    for pair in itertools.combinations_with_replacement(sorted(set(case.kinds)), 2):
        counts[f"pair {pair[0]} + {pair[1]}"] += MAPS


def work(job: tuple[int, int], most_problems: int = 3) -> tuple[Counts, list[str]]:
    seed, wanted = job
    rng = random.Random(seed)
    numbers = np.random.default_rng(seed)
    counts: Counts = collections.Counter()
    problems: list[str] = []
    while counts["hits"] < wanted and len(problems) < most_problems:
        case = cases.make(rng)
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
    counts["requests whose block hashes are equal"] = HASHED_REQUESTS
    problems += block_hashes.compare(arguments.seed, HASHED_REQUESTS)
    for name, count in sorted(counts.items()):
        print(f"{name:<50} {count:>9}")
    for problem in problems:
        print(f"DIFFERENT {problem}")
    print(f"{len(problems)} differences, {time.monotonic() - began:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
