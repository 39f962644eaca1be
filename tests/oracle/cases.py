"""Random configurations and existence maps."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

# Kinds that share a table with any other kind.
KINDS = (
    "full_attention",
    "mla_attention",
    "rswa",
    "hidden_state",
    "sink_full_attention",
    "sliding_window",
    "sliding_window_mla",
    "mamba",
)
CHUNKED = "chunked_local_attention"
STORED = (*KINDS, CHUNKED)
# What stands beside them and is never stored; a bounded replay is no kind of its own.
REPLAYED = "sliding_window_mla, replayed"
SCRATCH = ("circular_buffer", "hisparse_hot", "hisparse_resident", REPLAYED)
# One vector a position, which every tensor rank holds.
LATENT = ("mla_attention", "hidden_state", "sliding_window_mla")
# Need every block of a prefix, so that they may share a wrapper.
WHOLE = ("full_attention", "rswa", "sink_full_attention")
PAIRS = tuple(
    itertools.chain(
        itertools.combinations_with_replacement(sorted(STORED), 2),
        itertools.product(sorted(STORED), SCRATCH),
    )
)


@dataclass
class Case:
    """A configuration, and what the engine decides beside it."""

    config: dict[str, Any]
    prefix_match_unit: int | None
    use_eagle: bool
    model_total_kv_heads: int
    total_kv_heads: int  # of its groups, where they are spread over the tensor ranks


def members_of(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The specs inside a wrapper, or the one."""
    return list(group.get("members", [group]))


def layers_of(group: dict[str, Any]) -> list[str]:
    return [layer for member in members_of(group) for layer in member["layers"]]


def tokens_of(spec: dict[str, Any]) -> int:
    """Tokens in a block, without context ranks."""
    per_block = spec["block_size"] * spec.get("compression", 1) // spec.get("states_per_token", 1)
    return int(per_block)


def kind_of(group: dict[str, Any]) -> str:
    first = members_of(group)[0]
    return REPLAYED if first.get("bounded_replay") else str(first["kind"])


def attention(kind: str, layer: str, tokens: int, rng: random.Random) -> dict[str, Any]:
    group: dict[str, Any] = {
        "kind": kind,
        "layers": [layer],
        "block_size": tokens,
        "num_kv_heads": 1,
        "head_size": rng.choice((8, 16)),
        "dtype": "bfloat16",
    }
    if kind in LATENT:
        group["head_size_v"] = 0
    if kind.startswith("sliding_window"):
        group["sliding_window"] = rng.choice(
            (2, tokens, tokens + 1, 2 * tokens + 1, 3 * tokens, 5 * tokens + 3)
        )
        roll = rng.random()
        if roll < 0.03:
            group["sliding_window"] = 1
        elif roll < 0.1:
            group["extra_retained_tokens"] = rng.choice((1, 3, tokens))
    if kind == "rswa":
        group["rswa_window"] = 2 * tokens
    if kind == "sink_full_attention":
        group["sink_len"] = tokens * rng.choice((1, 2))
    if kind == CHUNKED:
        group["attention_chunk_size"] = tokens * rng.choice((1, 2, 3, 4)) + (
            tokens // 2 if rng.random() < 0.2 else 0
        )
    if kind in ("full_attention", "mla_attention", "sliding_window_mla"):
        roll = rng.random()
        if roll < 0.1:
            group["compression"] = rng.choice((2, 4))
            group["block_size"] = tokens // group["compression"]
        elif roll < 0.15:
            group["states_per_token"] = 2
            group["block_size"] = tokens * 2
    return group


def mamba(layer: str, tokens: int, rng: random.Random) -> dict[str, Any]:
    return {
        "kind": "mamba",
        "layers": [layer],
        "block_size": tokens,
        "mamba_cache_mode": "align",
        "shapes": [[rng.choice((4, 8)), 8]],
        "dtypes": ["float32"],
        "num_speculative_blocks": rng.choice((0, 0, 0, 1, 2)),
        "num_prefill_checkpoint_blocks": rng.choice((0, 0, 0, 1)),
    }


def scratch(kind: str, layer: str, tokens: int, rng: random.Random) -> dict[str, Any]:
    """A group that is never stored."""
    if kind == "circular_buffer":
        return attention(kind, layer, tokens, rng)
    if kind == REPLAYED:
        group = attention("sliding_window_mla", layer, tokens, rng)
        return group | {"bounded_replay": True, "replay_tokens": 0}  # vLLM goes back by itself
    group = {
        "kind": kind,
        "layers": [layer],
        "block_size": tokens,
        "page_size_bytes": 64,
        "enable_kv_transfer": False,
    }
    return group | ({"blocks_per_request": 2} if kind == "hisparse_hot" else {})


def group_of(kind: str, layer: str, tokens: int, rng: random.Random) -> dict[str, Any]:
    if kind == "mamba":
        return mamba(layer, tokens, rng)
    return attention(kind, layer, tokens, rng)


def wrapper(kind: str, layer: str, tokens: int, rng: random.Random) -> dict[str, Any]:
    """Layers in a uniform wrapper, alike, of unequal heads or of two kinds with one rule."""
    first = group_of(kind, layer, tokens, rng)
    second = dict(first, layers=[layer + "b"])
    if kind in WHOLE and rng.random() < 0.3:
        second = group_of(rng.choice(WHOLE), layer + "b", tokens, rng)
    elif kind != "mamba" and rng.random() < 0.5:
        second["head_size"] = first["head_size"] * 2
    third = dict(rng.choice((first, second)), layers=[layer + "c"])
    return {"kind": "uniform", "members": [first, second, third]}


def disagreeing(rng: random.Random) -> dict[str, Any]:
    """A wrapper whose second layer needs other blocks than its first, in one way or several."""
    tokens = rng.choice((8, 16))
    kind = rng.choice(("full_attention", "sliding_window", "sliding_window_mla", CHUNKED))
    first = attention(kind, "a", tokens, rng)
    second = dict(first, layers=["b"])
    way = rng.choice(("block", "window", "rule"))
    if way == "block" or (way == "window" and kind == "full_attention"):
        second["block_size"] = first["block_size"] * 2
    elif way == "window":
        key = "attention_chunk_size" if kind == CHUNKED else "sliding_window"
        second[key] = first[key] + rng.choice((1, tokens))
    else:
        others = ["mla_attention", "sliding_window", CHUNKED]
        same = {"full_attention": "mla_attention", "sliding_window_mla": "sliding_window"}
        others.remove(same.get(kind, kind))
        second = attention(rng.choice(others), "b", tokens, rng)
    return {"kind": "uniform", "members": [first, second]}


def spread_heads(groups: list[dict[str, Any]], total: int, tp: int, rng: random.Random) -> None:
    """The heads that a rank holds, where the model has `total`."""
    for group in groups:
        # A wrapper's layers are spread alike.
        shards = [count for count in (1, 2, 4, 8) if count <= min(total, tp)]
        told = rng.choice(shards) if rng.random() < 0.08 else None
        for member in members_of(group):
            if "num_kv_heads" not in member or member["kind"] in LATENT:
                continue
            if told is None:
                member["num_kv_heads"] = max(1, total // tp)
                member["total_num_kv_heads"] = total
            else:
                # The total follows.
                member["num_kv_heads"] = total // told
                member["max_tp_shards"] = told


def make(rng: random.Random) -> Case:
    count = rng.choice((1, 2, 2, 2, 3, 3, 4))
    kinds = [rng.choice(KINDS) for _ in range(count)]
    base = rng.choice((4, 16))
    sizes = rng.choice(((1,), (1, 2), (1, 2, 4), (2, 4)))
    use_dcp = rng.random() < 0.15
    chunked = rng.random() < 0.12
    fine = not chunked and rng.random() < 0.25
    if chunked:
        # The reference takes them on one block size only.
        if rng.random() < 0.8:
            sizes = (1,)
        use_dcp = False
        for index in rng.sample(range(count), rng.choice((1, min(2, count)))):
            kinds[index] = CHUNKED
    if fine:
        # Hits end inside blocks where states do and no window is larger than a hash.
        kinds = ["mamba", *(rng.choice(KINDS[:5]) for _ in range(count))][:4]
        sizes = (4,)
    if any(kind.startswith("sliding_window") for kind in kinds) and rng.random() < 0.5:
        use_dcp = False
    groups: list[dict[str, Any]] = []
    for index, kind in enumerate(kinds):
        size = base * rng.choice(sizes)
        # Windows and states cannot be spread over the ranks, others may be held by each.
        window = kind.startswith("sliding_window")
        apart = use_dcp and kind != "mamba" and (window or rng.random() < 0.15)
        if apart or (use_dcp and kind == "mamba"):
            size *= 2
        made = wrapper if rng.random() < 0.15 else group_of
        group = made(kind, f"l{index}", size, rng)
        twin = groups[0] if groups and kind == kinds[0] else None
        if twin is not None and "members" not in twin and rng.random() < 0.5:
            # Equal specs are searched as one.
            group = dict(twin, layers=[f"l{index}"])
        elif apart:
            for member in members_of(group):
                member["dcp_sharded"] = False
        groups.append(group)
    if fine and rng.random() < 0.3:
        groups.append(group_of("sliding_window", "w", base, rng))
        use_dcp = False
    use_eagle = rng.random() < (0.25 if chunked else 0.35)
    if use_eagle and rng.random() < 0.75:
        for group in groups:
            if rng.random() < 0.4 and not (chunked and rng.random() < 0.8):
                group["is_eagle_group"] = True
    if rng.random() < 0.3:
        for number in range(rng.choice((1, 1, 2))):
            kind = rng.choice(SCRATCH[:3] if use_dcp else SCRATCH)
            extra = scratch(kind, f"s{number}", base, rng)
            groups.insert(rng.randrange(len(groups) + 1), extra)
    if rng.random() < 0.1 and len(groups) > 1:
        groups[rng.randrange(len(groups))]["enable_kv_transfer"] = False
    for group in groups:
        if "members" not in group:
            group["layers"] = [group["layers"][0] + end for end in ("", ".1", ".2")]
    heads = rng.choice((1, 2, 4, 8))
    parallel = {"tp": rng.choice((1, 1, 2, 4, 8)), "pp": rng.choice((1, 1, 2))}
    if use_dcp:
        parallel |= {"tp": rng.choice((2, 4)), "dcp": 2}
    if len(groups) == 1 and rng.random() < 0.3:
        parallel |= {"pcp": 2, "pp": rng.choice((1, 2, 3))}
    # Now and then the groups have other heads than the model is said to have.
    total = heads if rng.random() < 0.9 else heads * 2
    spread_heads(groups, total, parallel["tp"], rng)
    unit = None
    if len(groups) > 1 and not chunked and rng.random() < 0.4:
        unit = base // rng.choice((1, 2, 4))
    config = {"num_blocks": 64, "groups": groups, "parallel": parallel}
    return Case(config, unit, use_eagle, heads, total)


def features(case: Case) -> dict[str, bool]:
    """What a finished configuration has, and has not."""
    groups = case.config["groups"]
    members = [member for group in groups for member in members_of(group)]
    parallel = case.config["parallel"]
    return {
        "chunked local": any(member["kind"] == CHUNKED for member in members),
        "uniform": any("members" in group for group in groups),
        "uniform of two kinds": any(
            len({member["kind"] for member in members_of(group)}) > 1 for group in groups
        ),
        "drafts flagged": case.use_eagle and any(g.get("is_eagle_group") for g in groups),
        "drafts unflagged": case.use_eagle and not any(g.get("is_eagle_group") for g in groups),
        "no transfer": any(
            not group.get("enable_kv_transfer", True) and kind_of(group) in STORED
            for group in groups
        ),
        "dcp 2": parallel.get("dcp", 1) == 2,
        "pcp 2": parallel.get("pcp", 1) == 2,
        "not shared by context ranks": parallel.get("dcp", 1) == 2
        and any(not member.get("dcp_sharded", True) for member in members),
        "a window beside context ranks": parallel.get("dcp", 1) == 2
        and any("sliding_window" in member for member in members),
        "compression": any("compression" in member for member in members),
        "several states of a token": any("states_per_token" in member for member in members),
        "max_tp_shards": any("max_tp_shards" in member for member in members),
        "extra retained tokens": any("extra_retained_tokens" in member for member in members),
        "speculative blocks of states": any(
            member.get("num_speculative_blocks") for member in members
        ),
        "checkpoint blocks of states": any(
            member.get("num_prefill_checkpoint_blocks") for member in members
        ),
        "a window of one token": any(member.get("sliding_window") == 1 for member in members),
        "a hash unit of its own": case.prefix_match_unit is not None,
    }


# Every one of them must have been met by a full comparison.
TRAITS = tuple(features(Case({"groups": [], "parallel": {}}, None, False, 1, 1)))


FAULTS = (
    "none",
    "nothing to store",
    "cross_attention",
    "encoder_only_attention",
    "mode of states",
    "mode in a wrapper",
    "pcp 2",
    "sizes",
    "host resident",
)


@dataclass
class Fault:
    """Groups and sizes of an engine with which a store may not be able to work."""

    config: dict[str, Any]
    step: int
    unit: int
    names: tuple[str, ...]


def spoil(rng: random.Random) -> Fault:
    """Up to two faults in a configuration that is right without them."""
    tokens = rng.choice((8, 16))
    names = tuple(sorted({rng.choice(FAULTS) for _ in range(rng.choice((1, 1, 2)))}))
    kinds = [rng.choice(STORED) for _ in range(rng.choice((1, 2, 3)))]
    groups = [
        group_of(kind, f"l{index}", tokens * rng.choice((1, 2)), rng)
        for index, kind in enumerate(kinds)
    ]
    if "nothing to store" in names:
        groups = [scratch(rng.choice(SCRATCH), "s", tokens, rng)]
    if "host resident" in names:
        rng.choice(groups)["host_resident"] = True
    for kind in ("cross_attention", "encoder_only_attention"):
        if kind in names:
            transfer = rng.random() < 0.7
            groups.append(attention(kind, kind, tokens, rng) | {"enable_kv_transfer": transfer})
    if "mode of states" in names:
        groups.append(mamba("m", tokens, rng) | {"mamba_cache_mode": rng.choice(("none", "all"))})
    if "mode in a wrapper" in names:
        members = [mamba("u", tokens, rng), mamba("v", tokens, rng)]
        rng.choice(members)["mamba_cache_mode"] = "none"
        groups.append({"kind": "uniform", "members": members})
    blocks = [tokens_of(members_of(group)[0]) for group in groups]
    step, unit = math.lcm(*blocks), math.gcd(*blocks)
    if "sizes" in names:
        step, unit = (
            step * rng.choice((1, 2, 3)) // rng.choice((1, 2)),
            unit * rng.choice((1, 2, 3)),
        )
    parallel = {"pcp": 2} if "pcp 2" in names else {}
    return Fault({"num_blocks": 64, "groups": groups, "parallel": parallel}, step, unit, names)


def existence(
    rng: np.random.Generator, maps: int, rows: list[tuple[int, int]], hashes: int
) -> np.ndarray:
    """[maps, groups, hashes]: mostly a stored prefix, with holes and with strays behind it.

    ``rows`` has for each group the hashes of a chunk, and whether objects may end inside one.
    """
    out = np.zeros((maps, len(rows), hashes), dtype=np.uint8)
    ends = np.arange(1, hashes + 1)
    stored = rng.integers(0, hashes + 1, (maps, 1))
    holes = rng.choice((0.0, 0.02, 0.1, 0.4), (maps, 1))
    strays = rng.choice((0.0, 0.1, 0.6), (maps, 1))
    spread = rng.choice((0, 0, 0, 3), (maps, 1))
    for group, (scale, fine) in enumerate(rows):
        limit = stored + rng.integers(-spread, spread + 1)
        chance = np.where(ends <= limit, 1.0 - holes, strays)
        inside = ends % scale != 0
        # Objects inside a block are rare but for the end of what was stored.
        chance = np.where(inside, (0.15 if fine else 0.3) * chance, chance)
        if fine:
            chance = np.where(ends == limit, 1.0 - holes, chance)
        out[:, group] = rng.random((maps, hashes)) < chance
    return out
