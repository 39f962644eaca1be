"""Cache configs that tests start from."""

from __future__ import annotations

from typing import Any


def attention(**changes: Any) -> dict[str, Any]:
    group = {
        "kind": "full_attention",
        "layers": ["f0"],
        "block_size": 800,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": "bfloat16",
    }
    return group | changes


def ring(**changes: Any) -> dict[str, Any]:
    return attention(kind="circular_buffer", layers=["r0"], block_size=8) | changes


def mamba(**changes: Any) -> dict[str, Any]:
    group = {
        "kind": "mamba",
        "layers": ["m0"],
        "block_size": 800,
        "mamba_cache_mode": "align",
        "shapes": [[4, 32]],
        "dtypes": ["float32"],
    }
    return group | changes


def config(*groups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A config of these groups; of attention, a ring and a state when there are none."""
    return {"num_blocks": 16, "groups": list(groups or (attention(), ring(), mamba()))} | changes
