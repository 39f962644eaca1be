"""KV-cache storage and transfer for hybrid models.

A hybrid model's cache is several groups, each with its own spec. Which of them may be transferred
and which may be stored are different sets; :class:`Projection` splits them once, and everything
else is built on it.
"""

from ._core import (
    ArgumentError,
    CacheConfig,
    CacheTensor,
    ClosedError,
    ConfigError,
    Error,
    Group,
    GroupId,
    KeySchema,
    MismatchError,
    NotFoundError,
    ParallelSizes,
    Problem,
    Projection,
    RankPosition,
    SegmentMap,
    SpecRegistry,
    StoreIndex,
    TimedOutError,
    TransferIndex,
    UnavailableError,
    UnsupportedError,
    __version__,
    kernel_blocks,
    rank_position,
    validate_store,
)

__all__ = [
    "ArgumentError",
    "CacheConfig",
    "CacheTensor",
    "ClosedError",
    "ConfigError",
    "Error",
    "Group",
    "GroupId",
    "KeySchema",
    "MismatchError",
    "NotFoundError",
    "ParallelSizes",
    "Problem",
    "Projection",
    "RankPosition",
    "SegmentMap",
    "SpecRegistry",
    "StoreIndex",
    "TimedOutError",
    "TransferIndex",
    "UnavailableError",
    "UnsupportedError",
    "__version__",
    "kernel_blocks",
    "rank_position",
    "validate_store",
]
