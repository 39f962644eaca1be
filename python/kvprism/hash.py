"""Block hashes for engines that have none of their own, digest for digest those of vLLM."""

import os

from ._core import BlockHasher

__all__ = ["BlockHasher", "block_hasher", "environment_seed"]


def environment_seed() -> str | None:
    """What vLLM begins its chains with: PYTHONHASHSEED, or None for its own constant."""
    return os.environ.get("PYTHONHASHSEED")


def block_hasher(algorithm: str, hash_block_size: int) -> BlockHasher:
    """The hasher of a vLLM process with this environment.

    Args:
        algorithm: ``sha256_cbor`` or ``xxhash_cbor``, as vLLM's ``prefix_caching_hash_algo``.
        hash_block_size: Tokens per hash.

    Raises:
        ConfigError: ``xxhash_cbor`` without PYTHONHASHSEED: vLLM then draws a seed that no other
            process has.
    """
    return BlockHasher(algorithm, hash_block_size=hash_block_size, seed=environment_seed())
