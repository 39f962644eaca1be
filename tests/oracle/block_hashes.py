"""Are kvprism's block hashes those of vLLM's own hasher, extras included?"""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from kvprism.hash import block_hasher
from vllm.utils.hashing import sha256_cbor, xxhash_cbor
from vllm.v1.core import kv_cache_utils


def request_of(rng: random.Random, unit: int) -> tuple[SimpleNamespace, dict[str, Any]]:
    """A request as vLLM's hasher reads it, and the same for ours."""
    tokens = [rng.choice((0, 23, 24, 255, 256, 65535, 65536, 151_935)) for _ in range(5 * unit + 3)]
    items, offset = [], 0
    for number in range(rng.randrange(4)):
        offset += rng.randrange(2 * unit)
        length = rng.randrange(1, 3 * unit)
        items.append((f"picture {number}", offset, length))
        offset += length
    lora = ("adapter", "/path/to/adapter") if rng.random() < 0.3 else None
    salt = "salt" if rng.random() < 0.3 else ""
    embeds = None
    if rng.random() < 0.3:
        embeds = torch.from_numpy(
            np.random.default_rng(len(items)).random((rng.randrange(1, 6 * unit), 4), np.float32)
        )
    theirs = SimpleNamespace(
        block_hashes=[],
        num_tokens=len(tokens),
        all_token_ids=tokens,
        mm_features=[
            SimpleNamespace(
                identifier=name, mm_position=SimpleNamespace(offset=offset, length=length)
            )
            for name, offset, length in items
        ],
        lora_request=SimpleNamespace(lora_name=lora[0], lora_path=lora[1]) if lora else None,
        cache_salt=salt or None,
        prompt_embeds=embeds,
        _prompt_embeds_per_block_hashes={},
    )
    ours = {
        "tokens": tokens,
        "lora": lora,
        "items": items,
        "cache_salt": salt,
        "prompt_embeds": None if embeds is None else embeds.numpy(),
    }
    return theirs, ours


def compare(seed: int, cases: int) -> list[str]:
    """What differs over random requests, with vLLM's default seed and with PYTHONHASHSEED."""
    rng = random.Random(seed)
    problems: list[str] = []
    before = os.environ.pop("PYTHONHASHSEED", None)
    try:
        # Without a seed vLLM begins the chain of xxhash_cbor with random bytes.
        for chain, digest in ((None, sha256_cbor), ("42", sha256_cbor), ("42", xxhash_cbor)):
            if chain is not None:
                os.environ["PYTHONHASHSEED"] = chain
            kv_cache_utils.init_none_hash(digest)
            hasher_of = kv_cache_utils.get_request_block_hasher
            for _ in range(cases // 3):
                unit = rng.choice((1, 4, 16, 100))
                theirs, ours = request_of(rng, unit)
                found = block_hasher(digest.__name__, unit).hashes(**ours)
                if [row.tobytes() for row in found] != hasher_of(unit, digest)(theirs):
                    problems.append(f"{digest.__name__}, seed {chain}, {unit} tokens: {ours}")
    finally:
        os.environ.pop("PYTHONHASHSEED", None)
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before
    return problems
