"""vLLM's own planning of caches, under the names of its versions."""

from __future__ import annotations

from typing import Any

from vllm.v1.core import kv_cache_utils as _utils

try:
    from vllm.v1.core import kv_cache_planning as _planning  # since 0.33
except ImportError:
    _planning = _utils


def of_workers(vllm_config: Any, specs: list[dict[str, Any]], memory: int) -> list[Any]:
    """The ``KVCacheConfig`` of each worker, of which each has that many bytes of memory."""
    arguments = [vllm_config, specs, [memory] * len(specs)]
    # Since 0.33 the groups of the whole model are made in a step of their own.
    global_groups = getattr(_planning, "get_global_kv_cache_groups", None)
    if global_groups is not None:
        arguments.append(global_groups(vllm_config, specs))
    return list(_planning.get_kv_cache_configs(*arguments))


def of_scheduler(workers: list[Any]) -> Any:
    """The scheduler's ``KVCacheConfig`` from those of its workers."""
    return _utils.generate_scheduler_kv_cache_config(workers)
