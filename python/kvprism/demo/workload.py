"""What the demonstration serves: two hybrid caches, and conversations with one system prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import CacheConfig, KeySchema, Projection

Tokens = npt.NDArray[np.uint32]

CONVERSATIONS = 8
TURNS = 4  # before the restart; one more comes after it
SYSTEM_TOKENS = 1700
USER_TOKENS = (500, 900)  # of a turn, at least and at most
OUTPUT_TOKENS = 20
VOCABULARY = 1 << 16
SEED = 20


def _layers(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


# A scratch ring as QSA has it: it must travel from prefill to decode, and never enter a store.
_RING: dict[str, Any] = {
    "kind": "circular_buffer",
    "layers": _layers("ring", 2),
    "block_size": 8,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": "bfloat16",
}

_STATE: dict[str, Any] = {
    "kind": "mamba",
    "layers": _layers("state", 8),
    "block_size": 800,
    "mamba_cache_mode": "align",
    "shapes": [[8, 64, 128], [3, 2048]],
    "dtypes": ["float32", "float32"],
}


def _attention(block_size: int, layers: int) -> dict[str, Any]:
    return {
        "kind": "full_attention",
        "layers": _layers("full", layers),
        "block_size": block_size,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": "bfloat16",
    }


def _window(block_size: int, window: int, layers: int) -> dict[str, Any]:
    return {
        **_attention(block_size, layers),
        "kind": "sliding_window",
        "layers": _layers("window", layers),
        "sliding_window": window,
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "state": {"num_blocks": 80, "groups": [_attention(800, 8), _RING, _STATE]},
    "window": {"num_blocks": 300, "groups": [_attention(256, 8), _RING, _window(128, 512, 8)]},
}


@dataclass(frozen=True)
class Variant:
    """One cache of the demonstration.

    Attributes:
        name: A key of VARIANTS.
        projection: Its groups.
        schema: Names its objects.
    """

    name: str
    projection: Projection
    schema: KeySchema


def variant(name: str) -> Variant:
    """Builds a variant; every process of the demonstration builds the same."""
    projection = Projection(CacheConfig.from_dict(VARIANTS[name]))
    schema = KeySchema.kvprism(
        projection,
        model=f"demo/{name}",
        hash_algorithm="simulated",
        hash_is_stable=True,
    )
    return Variant(name, projection, schema)


def system_prompt() -> Tokens:
    """The tokens that all conversations begin with."""
    return np.random.default_rng(SEED).integers(VOCABULARY, size=SYSTEM_TOKENS, dtype=np.uint32)


def user_turn(conversation: int, turn: int) -> Tokens:
    """What the user of a conversation says in a turn."""
    random = np.random.default_rng((SEED, conversation, turn))
    return random.integers(
        VOCABULARY, size=random.integers(*USER_TOKENS, endpoint=True), dtype=np.uint32
    )
