"""What vLLM's own cache, its block pool, names with a request's hashes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def names(pool: Any, hashes: Sequence[bytes], group: int, block: int, tokens: int) -> bool:
    """Whether a block is found for that many tokens: it may have been given to somebody else."""
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    at = tokens // pool.hash_block_size - 1
    if not 0 <= at < len(hashes):
        return False
    key = make_block_hash_with_group_id(hashes[at], group)
    return bool(pool.cached_block_hash_to_block.contain(key, block))


def named_beyond(
    pool: Any, hashes: Sequence[bytes], tables: Iterable[Sequence[Any]], tokens: int
) -> set[int]:
    """Blocks of a request's tables that are found for more tokens than those.

    Args:
        pool: vLLM's block pool.
        hashes: The request's.
        tables: Its blocks, of each group.
        tokens: So many had been computed.
    """
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    beyond = hashes[tokens // pool.hash_block_size :]
    found = set()
    for group, blocks in enumerate(tables):
        keys = {make_block_hash_with_group_id(each, group) for each in beyond}
        for block in blocks:
            # A block that was given to somebody else meanwhile has other names.
            others = pool.cached_block_hashes_by_block.get(block.block_id, ())
            if block.block_hash in keys or not keys.isdisjoint(others):
                found.add(block.block_id)
    return found
