"""Does this vLLM still speak as the connector does? Asked once, when it is constructed."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

from .._core import UnsupportedError

# Parameters with which vLLM calls the connector.
_METHODS: dict[str, tuple[str, ...]] = {
    "register_kv_caches": ("kv_caches",),
    "bind_connector_metadata": ("connector_metadata",),
    "clear_connector_metadata": (),
    "start_load_kv": ("forward_context", "kwargs"),
    "wait_for_layer_load": ("layer_name",),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "wait_for_save": (),
    "get_transfer_results": ("finished_req_ids",),
    "get_block_ids_with_load_errors": (),
    "build_connector_worker_meta": (),
    "shutdown": (),
    "bind_kv_cache_manager": ("kv_cache_manager",),
    "bind_gpu_block_pool": ("gpu_block_pool",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
    "on_new_request": ("request",),
    "update_connector_output": ("connector_output",),
    "request_finished": ("request", "block_ids"),
    "has_pending_push_work": (),
    "reset_cache": (),
}

# Fields and methods that the connector uses of vLLM's own classes.
_USED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        ("num_scheduled_tokens", "kv_connector_block_state"),
    ),
    (
        "vllm.v1.kv_cache_interface",
        "KVCacheConfig",
        ("num_blocks", "kv_cache_tensors", "kv_cache_groups", "prefix_cacheable_group_ids"),
    ),
    (
        "vllm.v1.kv_cache_interface",
        "KVCacheTensor",
        ("size", "layers", "layer_stride", "block_stride", "offset"),
    ),
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", ("layer_names", "kv_cache_spec")),
    (
        "vllm.v1.outputs",
        "KVConnectorOutput",
        ("finished_recving", "failed_recving", "invalid_block_ids", "kv_connector_worker_meta"),
    ),
    ("vllm.v1.core.block_pool", "BlockPool", ("touch", "free_blocks")),
)


def _parameters(function: Any) -> tuple[str, ...]:
    names = tuple(inspect.signature(function).parameters)
    return names[1:] if names[:1] in (("self",), ("cls",)) else names


def differences(
    base: type, used: tuple[tuple[str, str, tuple[str, ...]], ...] = _USED
) -> list[str]:
    """What differs between vLLM's contract and the one that the connector was written for.

    Args:
        base: vLLM's base class of connectors.
        used: Module, class and members that the connector reads.
    """
    found = []
    for name, expected in _METHODS.items():
        method = getattr(base, name, None)
        if method is None:
            found.append(f"{base.__name__}.{name}: missing, expected ({', '.join(expected)})")
        elif (ours := _parameters(method)) != expected:
            found.append(
                f"{base.__name__}.{name}({', '.join(ours)}): expected ({', '.join(expected)})"
            )
    for module_name, class_name, members in used:
        try:
            cls = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError):
            found.append(f"{module_name}.{class_name}: missing")
            continue
        fields = getattr(cls, "__dataclass_fields__", {})
        for member in members:
            if member not in fields and not hasattr(cls, member):
                found.append(f"{module_name}.{class_name}.{member}: missing")
    return found


@functools.cache
def check_contract() -> None:
    """Raises UnsupportedError that names every difference."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    found = differences(KVConnectorBase_V1)
    if not found:
        return
    try:
        from vllm import __version__ as version
    except ImportError:
        version = "unknown"
    lines = "\n  ".join(found)
    raise UnsupportedError(
        f"vLLM {version} differs from the contract that kvprism.vllm was written for "
        f"(0.30 to 0.33):\n  {lines}"
    )
