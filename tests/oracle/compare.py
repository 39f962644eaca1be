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
import math
import multiprocessing
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import block_hashes
import cases
import kvprism
import numpy as np
from kvprism import HitSearch
from reference import Reference, engine_takes, interface, meant, positions, refusal

HASHES = 48
MAPS = 32
HASHED_REQUESTS = 400

# What a comparison of this many hits must have met; the differences are those that
# docs/differences.md says are counted.
FULL = 200_000
NONZERO_SHARE = 0.3
DIFFERENCES = (
    "D1", "D2", "D3", "D4", "D5", "D6", "D7", "D8", "D9", "D18", "D19", "D20", "D21", "D22"
)  # fmt: skip
MET = (
    "hits with a local one",
    "load masks",
    "lookup masks",
    "lookups",
    "key sets",
    "ends of prompts",
    "pairs of stages",
    "pairs of stages, unequal layers",
    "pairs of stages, one without layers of a group",
    "sizes that kvprism computes",
    "wrappers that disagree",
    "configurations of the gallery",
    "arrangements of ranks, both contexts",
    "longest prefixes",
    "longest prefixes of drafts, proven",
    "with partial hits",
    "whole blocks",
    *(f"retention {each}" for each in ("none", "0", "S", "2S")),
    *(f"with {trait}" for trait in cases.TRAITS),
    *(f"difference {row}" for row in DIFFERENCES),
)

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


@dataclass(frozen=True)
class Need:
    """A chunk that a hit loads, and which objects serve it: those of `first` to `behind` units."""

    group: int
    chunk: int
    end: int  # tokens
    first: int
    behind: int


class Loads:
    """Which chunks of a hit are loaded, as the reference says; asked once for each hit."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.hashes = [hash_bytes(unit) for unit in range(HASHES)]
        self.sizes = reference.block_sizes
        self.states = reference.coordinator.mamba_group_ids
        self._known: dict[int, list[Need]] = {}

    def chunks(self, hit: int) -> list[list[int]]:
        """Of each group."""
        masks = self.reference.coordinator.load_mask(self.hashes, hit)
        return [[chunk for chunk, wanted in enumerate(mask) if wanted] for mask in masks]

    def needs(self, hit: int) -> list[Need]:
        known = self._known.get(hit)
        if known is None:
            unit = self.reference.unit
            known = []
            for group, chunks in enumerate(self.chunks(hit)):
                for chunk in chunks:
                    end = (chunk + 1) * self.sizes[group]
                    first = -(-min(end, hit) // unit)
                    # A longer object of the chunk holds its needed tokens too; of states only one.
                    behind = first if group in self.states else end // unit
                    known.append(Need(group, chunk, end, first, behind))
            self._known[hit] = known
        return known


class OurLoads(Loads):
    """As kvprism says, where the reference says nothing (D6)."""

    def __init__(self, reference: Reference, search: Any) -> None:
        super().__init__(reference)
        self._search = search

    def chunks(self, hit: int) -> list[list[int]]:
        return [list(range(*each)) for each in self._search.load_ranges(hit)]


def usable(loads: Loads, row: list[bytes], hit: int, local: int) -> str | None:
    """What a load of `hit` tokens would miss beyond the `local` ones, or None."""
    for need in loads.needs(hit):
        if need.end > local and not any(row[need.group][need.first - 1 : need.behind]):
            return f"group {need.group} has no object for chunk {need.chunk}"
    return None


def in_bytes(row: np.ndarray) -> list[bytes]:
    """A map that is quick to look into."""
    return [bytes(group) for group in row]


def longest_usable(loads: Loads, row: list[bytes], probed: int) -> int:
    """The longest prefix that a load could fetch."""
    return next(
        tokens
        for tokens in range(probed, -1, -loads.reference.alignment)
        if usable(loads, row, tokens, 0) is None
    )


def longest_proven(search: Any, loads: Loads, row: list[bytes], probed: int) -> int:
    """The longest of them behind which each draft has a block more, so that no rule may miss it."""
    drafts = {group.family for group in search.groups if group.draft}
    several = len({group.family for group in search.groups}) > 1

    def proven(tokens: int) -> bool:
        for at, group in enumerate(search.groups):
            size = group.chunk_tokens
            if group.family not in drafts or group.rule == "last_state":
                continue
            end = (tokens // size + 1) * size
            # One that reaches token 0 is cut to the grid with the block that is computed again.
            if group.rule == "window" and tokens < group.window + size and size % search.alignment:
                return False
            if end > probed + (size if several else 0) or end > HASHES * search.unit:
                return False
            if not row[at][end // search.unit - 1]:
                return False
        return True

    return next(
        (
            tokens
            for tokens in range(probed, 0, -search.alignment)
            if proven(tokens) and usable(loads, row, tokens, 0) is None
        ),
        0,
    )


def expect_longest(
    search: Any, loads: Loads, row: list[bytes], probed: int, ours: int, counts: Counts
) -> None:
    """By what a load could fetch, where the reference gives no answer, or a wrong one."""
    longest = longest_usable(loads, row, probed)
    if any(group.draft for group in search.groups):
        # A draft's last block is computed again.
        shortest = longest_proven(search, loads, row, probed)
        expect("no longer than what is there", ours <= longest, True, hit=ours, longest=longest)
        expect("no shorter than what is proven", ours >= shortest, True, hit=ours, least=shortest)
        counts["longest prefixes of drafts"] += 1
        counts["longest prefixes of drafts, proven"] += shortest > 0
    else:
        expect("longest prefix", ours, longest, probed=probed, map=row)
        counts["longest prefixes"] += 1


def uneven_chunks(search: Any) -> bool:
    return any(
        group.rule == "chunk" and group.window % group.chunk_tokens for group in search.groups
    )


def known_difference(
    search: Any, loads: Loads, row: list[bytes], ours: int, theirs: int
) -> str | None:
    """The row of docs/differences.md that explains two unequal hits."""
    if ours > theirs or usable(loads, row, theirs, 0) is None:
        return None
    return "D2" if uneven_chunks(search) else None


def chunks_assert(reference: Reference) -> bool:
    """Whether the reference cannot look up its attention chunks (D6)."""
    return any(
        isinstance(group.spec, interface.ChunkedLocalAttentionSpec)
        and (group.use_eagle or group.spec.block_size != reference.alignment)
        for group in reference.coordinator.attention_groups
    )


def probes(reference: Reference, count: int, rng: random.Random) -> list[int]:
    total = HASHES * reference.unit
    tokens = [total if rng.random() < 0.5 else rng.randrange(0, total + 1) for _ in range(count)]
    return [each // reference.alignment * reference.alignment for each in tokens]


def compare_asserting_hits(
    reference: Reference, search: Any, maps: np.ndarray, rng: random.Random, counts: Counts
) -> None:
    """Where the reference asserts: the longest prefix that a load could fetch (D6)."""
    loads = OurLoads(reference, search)
    probed = probes(reference, len(maps), rng)
    ours = search.find_hits(maps.reshape(-1), HASHES, locals=[0] * len(maps), probed=probed)
    for at, row in enumerate(maps):
        try:
            reference.find(loads.hashes, set(), probed[at])
        except AssertionError:
            counts["difference D6"] += 1
        else:
            raise MismatchError("the reference looks up an attention chunk after all")
        there = in_bytes(row)
        missing = usable(loads, there, ours[at], 0)
        expect("hit is in the store", missing, None, hit=ours[at], map=row.tolist())
        expect_longest(search, loads, there, probed[at], ours[at], counts)


def compare_hits(
    reference: Reference,
    plain: tuple[str, Reference] | None,
    search: Any,
    maps: np.ndarray,
    rng: random.Random,
    counts: Counts,
) -> None:
    loads = Loads(reference)
    hashes = loads.hashes
    probed = probes(reference, len(maps), rng)
    zeros = [0] * len(maps)
    flat = maps.reshape(-1)
    ours = search.find_hits(flat, HASHES, locals=zeros, probed=probed)
    tables = [in_bytes(row) for row in maps]
    for at, row in enumerate(maps):
        exists = {(int(group), hashes[unit]) for group, unit in zip(*np.nonzero(row), strict=True)}
        theirs = reference.find(hashes, exists, probed[at])
        counts["hits"] += 1
        if ours[at] != theirs:
            known = known_difference(search, loads, tables[at], ours[at], theirs)
            if known is None:
                expect("hit", ours[at], theirs, probed=probed[at], map=row.tolist())
            expect_longest(search, loads, tables[at], probed[at], ours[at], counts)
            counts[f"difference {known}"] += 1
        elif plain is not None and plain[1].find(hashes, exists, probed[at]) != theirs:
            # Ours is what the reference says of the window that is meant.
            counts[f"difference {plain[0]}"] += 1
        if theirs:
            counts["non-zero hits"] += 1
        missing = usable(loads, tables[at], ours[at], 0)
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
        missing = usable(loads, tables[at], hit, local)
        expect("hit is local or in the store", missing, None, hit=hit, local=local)
        loaded = [
            (group, chunk)
            for group, span in enumerate(search.load_ranges(hit, local))
            for chunk in range(*span)
        ]
        wanted = [(need.group, need.chunk) for need in loads.needs(hit) if need.end > local]
        expect("loaded chunks", loaded, wanted, hit=hit, local=local)
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
            expect(
                "lookup mask",
                row,
                [True] * len(row) if wanted is None else list(wanted),
                group=group,
                tokens=tokens,
            )
        counts["lookup masks"] += 1
        step = reference.step
        for name, retention in (("none", None), ("0", 0), ("S", step), ("2S", 2 * step)):
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
            counts[f"retention {name}"] += 1


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
    loads = Loads(reference)
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
                below = min(probed, limit)
                expect_longest(search, loads, in_bytes(seen), below, ours, counts)
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
            known = known_difference(search, loads, in_bytes(seen), ours, answer.hit_length)
            if known is None:
                expect("lookup", ours, answer.hit_length, tokens=tokens, map=row.tolist())
            expect_longest(search, loads, in_bytes(seen), min(probed, limit), ours, counts)
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
    places = positions(parallel["tp"], parallel["pcp"], parallel["dcp"], parallel["pp"])
    for at in rng.sample(range(len(places)), min(3, len(places))):
        one = reference.worker_of(at)
        position = kvprism.rank_position(at, schema.projection)
        expect("position", (position.tp, position.pcp, position.dcp, position.pp), places[at])
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
                    total, hashes, put_step=factor, put_step_rank=(one.tp_rank + group) % factor
                )
            ]
            chunks = range(-(-total // database.block_size))
            stored = [chunk for chunk in chunks if schema.stores(index, position, chunk)]
            expect("striping", stored, theirs, group=group, rank=at)
        counts["key sets"] += 1


def key_schema(case: cases.Case, projection: Any, reference: Reference, counts: Counts) -> Any:
    """Schema `vllm`, or None where it is refused."""
    wrong = {
        row
        for row, is_so in (
            ("D8", false_replicas(case, reference)),
            ("D21", false_stages(reference)),
        )
        if is_so
    }
    try:
        schema = kvprism.KeySchema.vllm(
            projection,
            model=reference.model,
            hash_algorithm="sha256",
            hash_is_stable=True,
        )
    except kvprism.ConfigError as error:
        told = {
            "D21" if problem.path.startswith("parallel") else "D8" for problem in error.problems
        }
        expect("why schema vllm is refused", told, wrong, error=error)
        for row in wrong:
            counts[f"difference {row}"] += 1
        return None
    expect("accepted although the reference's keys are wrong", wrong, set())
    return schema


def false_stages(reference: Reference) -> bool:
    """Whether ranks of two stages share a key, or keys are asked for that no rank stores."""
    parallel = reference.parallel
    if parallel["pcp"] == 1:
        return False
    stored: dict[str, int] = {}
    places = positions(parallel["tp"], parallel["pcp"], parallel["dcp"], parallel["pp"])
    for rank, (*_, stage) in enumerate(places):
        one = reference.worker_of(rank)
        for database in one.token_dbs:
            name = database.key_for(b"").rsplit("@", 1)[0]
            if stored.setdefault(name, stage) != stage:
                return True
    return any(not set(each) <= set(stored) for each in one._lookup_key_prefixes)


def false_replicas(case: cases.Case, reference: Reference) -> bool:
    """Whether ranks that share a key in the reference hold different heads."""
    factors = reference.worker_of().group_tp_replication_factors
    tp = reference.parallel["tp"]
    for group, factor in zip(reference.config.prefix_cacheable_group_ids, factors, strict=True):
        for member in cases.members_of(case.config["groups"][group]):
            if member["kind"] == "mamba" or member["kind"] in cases.LATENT:
                continue
            total = case.total_kv_heads
            shards = total // member["num_kv_heads"]
            held = [rank * shards // tp for rank in range(tp)]
            for first in range(0, tp, factor):
                if len(set(held[first : first + factor])) > 1:
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
    layers = cases.layers_of(group)
    held = layers[:cut] if stage == 0 else layers[cut:]
    if "members" not in group:
        return dict(group, layers=held)
    members = [
        dict(member, layers=[name for name in member["layers"] if name in held])
        for member in group["members"]
    ]
    # A stage without any keeps the wrapper's members.
    return dict(group, members=[member for member in members if member["layers"] or not held])


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
        names = {layer for group in groups for layer in cases.layers_of(group)}
        for number, group in enumerate(groups):
            if cases.layers_of(group):
                held[number].append(stage)
        store = [int(ours.group_id(kvprism.StoreIndex(i))) for i in range(ours.num_store_groups)]
        theirs = reference.stage_groups(names)
        if any(
            not group.get("enable_kv_transfer", True)
            and cases.kind_of(group) in cases.STORED
            and len(cases.layers_of(group)) < len(cases.layers_of(whole))
            for group, whole in zip(groups, config["groups"], strict=True)
        ):
            # The reference forgets this word on a stage that holds part of a group, or none.
            expect("D9", store != theirs, True)
            counts["difference D9"] += 1
        else:
            expect("store groups of a stage", store, theirs)
    first, second = projections
    counts["pairs of stages"] += 1
    if any(0 < cut < 3 for cut in cuts):
        counts["pairs of stages, unequal layers"] += 1
    if any(len(stages) < 2 for stages in held):
        counts["pairs of stages, one without layers of a group"] += 1
    kinds = [[group.kind for group in stage.groups()] for stage in projections]
    if kinds[0] == kinds[1]:
        expect("digest of a stage", first.digest, second.digest)
    else:
        # A wrapper goes by its first layer, and these begin with layers of two kinds.
        expect("D22", first.digest != second.digest, True)
        counts["difference D22"] += 1
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


def compare_sizes(case: cases.Case, reference: Reference, counts: Counts) -> None:
    """What kvprism computes where no engine gives it sizes, from the stored groups alone."""
    ours = kvprism.Projection(kvprism.CacheConfig.from_dict(case.config))
    sizes = reference.block_sizes
    blocks = [group.tokens_per_block for group in ours.groups() if group.store_index is not None]
    expect("tokens in a block", blocks, sizes)
    expect("computed step", ours.scheduler_block_size, math.lcm(*sizes))
    expect("computed unit", ours.hash_block_size, math.gcd(*sizes))
    counts["sizes that kvprism computes"] += 1
    wanted = [reference.step]
    computed = [ours.scheduler_block_size]
    if case.prefix_match_unit is None:
        wanted.append(reference.unit)
        computed.append(ours.hash_block_size)
    if ours.num_groups > ours.num_store_groups and computed != wanted:
        counts["difference D4"] += 1
    else:
        expect("computed sizes", computed, wanted)


def compare_wrappers(rng: random.Random, counts: Counts) -> None:
    """Layers of a wrapper that need different blocks: the reference goes by the first (D7)."""
    group = cases.disagreeing(rng)
    config = {"num_blocks": 64, "groups": [group], "parallel": {}}
    reference = Reference(config)
    alone = Reference(dict(config, groups=[group["members"][0]]))
    (theirs,) = reference.coordinator.attention_groups
    (first,) = alone.coordinator.attention_groups
    expect("spec of a wrapper", theirs.spec, first.spec)
    hashes = [hash_bytes(unit) for unit in range(HASHES)]
    everything = {(0, hash_) for hash_ in hashes}
    total = HASHES * reference.unit
    hit = alone.find(hashes, everything, total)
    expect("hit of a wrapper", reference.find(hashes, everything, total), hit)
    counts["wrappers that disagree"] += 1
    try:
        kvprism.Projection(kvprism.CacheConfig.from_dict(config))
    except kvprism.ConfigError as error:
        paths = {problem.path for problem in error.problems}
        expect("who disagrees", paths, {"groups[0].members[1]"}, error=error)
        counts["difference D7"] += 1
    else:
        raise MismatchError(f"accepted: {config}")


def wrong_paths(fault: cases.Fault) -> set[str]:
    """What a store must refuse of a start, by the rules' own words."""
    groups = list(enumerate(fault.config["groups"]))
    stored = [
        (at, group)
        for at, group in groups
        if cases.kind_of(group) in cases.STORED and group.get("enable_kv_transfer", True)
    ]
    paths = set()
    if not stored:
        paths.add("groups")
    if len(stored) > 1 and fault.config["parallel"].get("pcp", 1) > 1:
        paths.add("parallel.pcp")
    if fault.step % fault.unit:
        paths.add("scheduler_block_size")
    for at, group in groups:
        if group["kind"] == "cross_attention" and group["enable_kv_transfer"]:
            paths.add(f"groups[{at}].kind")
    for at, group in stored:
        tokens = cases.tokens_of(cases.members_of(group)[0])
        if tokens % fault.unit or fault.step % tokens:
            paths.add(f"groups[{at}].block_size")
        if group.get("host_resident"):
            paths.add(f"groups[{at}].host_resident")
        for number, member in enumerate(cases.members_of(group)):
            if member.get("mamba_cache_mode", "align") != "align":
                inside = f".members[{number}]" if "members" in group else ""
                paths.add(f"groups[{at}]{inside}.mamba_cache_mode")
    return paths


def explained(problems: list[Any], fault: cases.Fault, theirs: str | None) -> set[str]:
    """The rows that explain two unequal verdicts; "" of what none explains."""
    if problems:
        rows = {"host_resident": "D19", "mamba_cache_mode": "D20"}
        return {rows.get(problem.path.rsplit(".", 1)[-1], "") for problem in problems}
    encoder = any(
        group["kind"] == "encoder_only_attention" and group["enable_kv_transfer"]
        for group in fault.config["groups"]
    )
    return {"D18" if encoder else ""}


def compare_refusals(rng: random.Random, counts: Counts) -> None:
    """What kvprism refuses to start with, the reference refuses, and the other way round."""
    fault = cases.spoil(rng)
    theirs = refusal(fault.config, fault.step, fault.unit, None)
    sizes = {"scheduler_block_size": fault.step, "hash_block_size": fault.unit}
    ours = kvprism.validate_store(
        kvprism.Projection(kvprism.CacheConfig.from_dict(fault.config | sizes))
    )
    expect("what a start is refused for", {each.path for each in ours}, wrong_paths(fault))
    for name in fault.names:
        counts[f"starts with fault: {name}"] += 1
    if bool(ours) == bool(theirs):
        counts["starts refused by both" if ours else "starts accepted by both"] += 1
        return
    for row in explained(ours, fault, theirs):
        if not row:
            expect("why a start is refused", [str(each) for each in ours], theirs, fault=fault)
        counts[f"difference {row}"] += 1


def refused_sizes(case: cases.Case, error: ValueError, counts: Counts) -> None:
    """The engine itself refuses hits inside a position that stands for several tokens."""
    if "compression" not in str(error) or case.prefix_match_unit is None:
        raise error
    config = case.config | {
        "hash_block_size": case.prefix_match_unit,
        "cache_hit_alignment_tokens": case.prefix_match_unit,
    }
    problems = kvprism.validate_store(kvprism.Projection(kvprism.CacheConfig.from_dict(config)))
    told = any("compression" in problem.expected for problem in problems)
    # The reference looks at groups that are not transferred as well.
    stored = any(
        case.prefix_match_unit % member.get("compression", 1)
        for group in case.config["groups"]
        if group.get("enable_kv_transfer", True) and cases.kind_of(group) in cases.STORED
        for member in cases.members_of(group)
    )
    expect("hits inside a position are refused", told, stored, error=error)
    counts["hits inside a position, refused by both"] += 1


def compare(
    case: cases.Case, rng: random.Random, numbers: np.random.Generator, counts: Counts
) -> None:
    facts: dict[str, Any] = {
        "prefix_match_unit": case.prefix_match_unit,
        "use_eagle": case.use_eagle,
        "model": rng.choice(("model", "org/model", "/models/org/model/")),
        "cache_prefix": rng.choice(("", "tenant", "a@b")),
        "model_total_kv_heads": case.model_total_kv_heads,
    }
    try:
        reference = Reference(meant(case.config), **facts)
    except ValueError as error:
        refused_sizes(case, error, counts)
        return
    if not reference.groups:
        return
    compare_sizes(case, reference, counts)
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
    expect("problems of a store", kvprism.validate_store(projection), [])
    search = HitSearch(projection)
    expect("step", search.step, reference.step)
    expect("unit", search.unit, reference.unit)
    expect("alignment", search.alignment, reference.alignment)
    rows = [
        (size // reference.unit, int(reference.alignment < size)) for size in reference.block_sizes
    ]
    maps = cases.existence(numbers, MAPS, rows, HASHES)
    has = {name for name, present in cases.features(case).items() if present}
    asserts = chunks_assert(reference)
    if asserts:
        compare_asserting_hits(reference, search, maps[:4], rng, counts)
    else:
        plain = None
        for row, trait in (("D1", "a window of one token"), ("D3", "extra retained tokens")):
            if trait in has:
                plain = (row, Reference(case.config, **facts))
        compare_hits(reference, plain, search, maps, rng, counts)
        compare_shared_prefixes(reference, search, maps, rng, counts)
    schema = key_schema(case, projection, reference, counts)
    if schema is not None:
        compare_keys(reference, schema, rng, counts)
        if not asserts:
            compare_lookups(reference, schema, search, maps[:4], rng, counts)
    if reference.parallel["pp"] == 2:
        compare_stages(config, reference, schema is not None, rng, counts)
    if asserts:
        return
    total = HASHES * reference.unit
    hits = [
        rng.randrange(0, total // reference.alignment + 1) * reference.alignment for _ in range(4)
    ]
    compare_masks(reference, search, hits, rng, counts)
    compare_prompt_ends(reference, search, rng, counts)
    for trait in has:
        counts[f"with {trait}"] += MAPS
    counts["with partial hits" if reference.alignment < reference.step else "whole blocks"] += MAPS
    kinds = [cases.kind_of(group) for group in case.config["groups"]]
    for pair in itertools.combinations(kinds, 2):
        counts[name_of(*pair)] += MAPS


def name_of(one: str, other: str) -> str:
    """Of two groups that a configuration holds."""
    first, second = sorted((one, other), key=lambda kind: (kind in cases.SCRATCH, kind))
    return f"pair {first} + {second}"


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
            if rng.random() < 0.4:
                compare_refusals(rng, counts)
            if rng.random() < 0.1:
                compare_wrappers(rng, counts)
        except MismatchError as problem:
            problems.append(f"{problem}\n    config: {case}")
    return counts, problems


ARRANGEMENTS = tuple(itertools.product((1, 2, 4), (1, 2), (1, 2, 4, 8), (1, 2, 3)))


def compare_positions(counts: Counts) -> list[str]:
    """Where each rank stands, in every arrangement that the engine takes."""
    problems = []
    for tp, pcp, dcp, pp in ARRANGEMENTS:
        if not engine_takes(tp, pcp, dcp):
            counts["arrangements that the engine refuses"] += 1
            continue
        group = cases.attention("full_attention", "a", 16, random.Random(tp))
        parallel = {"tp": tp, "pcp": pcp, "dcp": dcp, "pp": pp}
        config = {"num_blocks": 8, "groups": [group], "parallel": parallel}
        try:
            projection = kvprism.Projection(kvprism.CacheConfig.from_dict(config))
            ours = [kvprism.rank_position(rank, projection) for rank in range(tp * pcp * pp)]
            placed = [(each.tp, each.pcp, each.dcp, each.pp) for each in ours]
            expect("positions", placed, positions(tp, pcp, dcp, pp))
        except (MismatchError, kvprism.Error) as error:
            problems.append(f"{error}\n    parallel: {parallel}")
        counts["arrangements of ranks"] += 1
        counts["arrangements of ranks, both contexts"] += pcp > 1 and dcp > 1
    return problems


def compare_gallery(counts: Counts) -> list[str]:
    """The configurations of real models, as the tests with vLLM compare them."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "vllm"))
    import test_gallery

    problems = []
    for path in sorted(test_gallery.FOLDER.iterdir()):
        try:
            test_gallery.test_projections_sizes_and_bytes(path)
            test_gallery.test_groups_are_those_that_the_engine_makes(path)
        except (AssertionError, kvprism.Error) as error:
            problems.append(f"{path.stem}: {type(error).__name__} {error}")
        counts["configurations of the gallery"] += 1
    return problems


def unmet(counts: Counts) -> list[str]:
    """What a full comparison should have met and has not."""
    wanted = [*MET, *(name_of(*pair) for pair in cases.PAIRS)]
    wanted += [f"starts with fault: {name}" for name in cases.FAULTS]
    missing = [f"no case of: {name}" for name in wanted if not counts[name]]
    if counts["hits"] < FULL:
        missing.append(f"{counts['hits']} hits, fewer than {FULL}")
    if counts["non-zero hits"] < NONZERO_SHARE * counts["hits"]:
        missing.append(
            f"{counts['non-zero hits']} hits are not zero, fewer than {NONZERO_SHARE:.0%}"
        )
    return missing


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
    problems += compare_gallery(counts)
    problems += compare_positions(counts)
    if arguments.cases >= FULL:
        problems += unmet(counts)
    for name, count in sorted(counts.items()):
        print(f"{name:<50} {count:>9}")
    for problem in problems:
        print(f"DIFFERENT {problem}")
    print(f"{len(problems)} differences, {time.monotonic() - began:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
