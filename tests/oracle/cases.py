"""Random configurations and existence maps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Kinds that share a table with any other kind.
KINDS = (
    "full_attention",
    "mla_attention",
    "rswa",
    "sliding_window",
    "sliding_window_mla",
    "mamba",
)


@dataclass
class Case:
    """A configuration, and what the engine decides beside it."""

    config: dict[str, Any]
    prefix_match_unit: int | None
    use_eagle: bool
    kinds: tuple[str, ...]
    model_total_kv_heads: int
    traits: set[str] = field(default_factory=set)


def attention(kind: str, layer: str, block_size: int, rng: random.Random) -> dict[str, Any]:
    group: dict[str, Any] = {
        "kind": kind,
        "layers": [layer],
        "block_size": block_size,
        "num_kv_heads": 1,
        "head_size": rng.choice((8, 16)),
        "dtype": "bfloat16",
    }
    if "mla" in kind:
        group["head_size_v"] = 0
    if kind.startswith("sliding_window"):
        group["sliding_window"] = rng.choice(
            (2, block_size, block_size + 1, 2 * block_size + 1, 3 * block_size, 5 * block_size + 3)
        )
        if rng.random() < 0.03:
            group["sliding_window"] = 1
    if kind == "rswa":
        group["rswa_window"] = 2 * block_size
    if kind == "chunked_local_attention":
        group["attention_chunk_size"] = block_size * rng.choice((1, 2, 3, 4)) + (
            block_size // 2 if rng.random() < 0.2 else 0
        )
    return group


def mamba(layer: str, block_size: int, rng: random.Random) -> dict[str, Any]:
    return {
        "kind": "mamba",
        "layers": [layer],
        "block_size": block_size,
        "mamba_cache_mode": "align",
        "shapes": [[rng.choice((4, 8)), 8]],
        "dtypes": ["float32"],
    }


def group_of(kind: str, layer: str, block_size: int, rng: random.Random) -> dict[str, Any]:
    if kind == "mamba":
        return mamba(layer, block_size, rng)
    return attention(kind, layer, block_size, rng)


def wrapper(kind: str, layer: str, block_size: int, rng: random.Random) -> dict[str, Any]:
    """Two layers in a uniform wrapper, of equal or of unequal heads."""
    first = group_of(kind, layer, block_size, rng)
    second = dict(first, layers=[layer + "b"])
    if kind != "mamba" and rng.random() < 0.5:
        second["head_size"] = first["head_size"] * 2
    return {"kind": "uniform", "members": [first, second]}


def make(rng: random.Random) -> Case:
    traits: set[str] = set()
    count = rng.choice((1, 2, 2, 2, 3, 3, 4))
    kinds = [rng.choice(KINDS) for _ in range(count)]
    base = rng.choice((4, 16))
    sizes = rng.choice(((1,), (1, 2), (1, 2, 4), (2, 4)))
    use_dcp = rng.random() < 0.15
    if rng.random() < 0.12:
        # The reference takes them on one block size only.
        sizes = (1,)
        use_dcp = False
        kinds[rng.randrange(count)] = "chunked_local_attention"
        traits.add("chunked")
    if use_dcp and any(kind.startswith("sliding_window") for kind in kinds):
        use_dcp = False
    groups = []
    for index, kind in enumerate(kinds):
        size = base * rng.choice(sizes)
        if use_dcp and kind == "mamba":
            size *= 2  # states are not spread over the ranks
        make_group = group_of
        if rng.random() < 0.15:
            make_group = wrapper
            traits.add("uniform")
        group = make_group(kind, f"l{index}", size, rng)
        if index and kind == kinds[0] and rng.random() < 0.5 and "members" not in group:
            # Equal specs are searched as one.
            group = dict(groups[0], layers=[f"l{index}"])
            if "members" in group:
                group = make_group(kind, f"l{index}", size, rng)
        groups.append(group)
    if "chunked" not in traits and rng.random() < 0.25:
        # Hits end inside blocks where states do and no window is larger than a hash.
        kinds = ["mamba", *(rng.choice(KINDS[:3]) for _ in range(count))][:4]
        groups = [group_of(kind, f"l{index}", base * 4, rng) for index, kind in enumerate(kinds)]
        if rng.random() < 0.3:
            groups.append(group_of("sliding_window", "w", base, rng))
            kinds.append("sliding_window")
            use_dcp = False
    use_eagle = "chunked" not in traits and rng.random() < 0.35
    if use_eagle and rng.random() < 0.75:
        for group in groups:
            if rng.random() < 0.4:
                group["is_eagle_group"] = True
    if use_eagle:
        flagged = any(group.get("is_eagle_group") for group in groups)
        traits.add("draft flagged" if flagged else "draft unflagged")
    if rng.random() < 0.15:
        groups.insert(
            rng.randrange(len(groups) + 1), attention("circular_buffer", "ring", base, rng)
        )
        traits.add("ring")
    if rng.random() < 0.1 and len(groups) > 1:
        groups[rng.randrange(len(groups))]["enable_kv_transfer"] = False
        traits.add("no transfer")
    config: dict[str, Any] = {"num_blocks": 64, "groups": groups}
    for group in groups:
        if "members" not in group:
            group["layers"] = [group["layers"][0] + end for end in ("", ".1", ".2")]
    heads = rng.choice((1, 2, 4, 8))
    parallel = {"tp": rng.choice((1, 1, 2, 4, 8)), "pp": rng.choice((1, 1, 2))}
    if use_dcp:
        parallel |= {"tp": rng.choice((2, 4)), "dcp": 2}
        traits.add("dcp 2")
    if len(groups) == 1 and rng.random() < 0.2:
        parallel["pcp"] = 2
        traits.add("pcp 2")
    config["parallel"] = parallel
    # Now and then the groups have other heads than the model is said to have.
    total = heads if rng.random() < 0.9 else heads * 2
    for group in groups:
        for member in group.get("members", [group]):
            if member["kind"] == "mamba" or "mla" in member["kind"]:
                continue
            member["num_kv_heads"] = max(1, total // parallel["tp"])
            member["total_num_kv_heads"] = total
    unit = None
    if len(groups) > 1 and "chunked" not in traits and rng.random() < 0.4:
        unit = base // rng.choice((1, 2, 4))
    return Case(config, unit, use_eagle, tuple(kinds), heads, traits)


def existence(
    rng: np.random.Generator, maps: int, rows: list[tuple[int, int]], hashes: int
) -> np.ndarray:
    """[maps, groups, hashes]: mostly a stored prefix, with holes and with strays behind it.

    ``rows`` has for each group the hashes of a chunk, and whether objects may end inside one.
    """
    out = np.zeros((maps, len(rows), hashes), dtype=np.uint8)
    ends = np.arange(1, hashes + 1)
    for at in range(maps):
        stored = rng.integers(0, hashes + 1)
        holes = rng.choice((0.0, 0.02, 0.1, 0.4))
        strays = rng.choice((0.0, 0.1, 0.6))
        spread = rng.choice((0, 0, 0, 3))
        for group, (scale, fine) in enumerate(rows):
            limit = stored + (rng.integers(-spread, spread + 1) if spread else 0)
            chance = np.where(ends <= limit, 1.0 - holes, strays)
            inside = ends % scale != 0
            # Objects inside a block are rare but for the end of what was stored.
            chance = np.where(inside, (0.15 if fine else 0.3) * chance, chance)
            if fine:
                chance = np.where(ends == limit, 1.0 - holes, chance)
            out[at, group] = rng.random(hashes) < chance
    return out
