"""Does this vLLM still speak as the connector does? Asked once, when it is constructed."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

from .._core import UnsupportedError

# What vLLM has to call: without it the connector would do nothing, or wrong.
_NEEDED = (
    *("register_kv_caches", "bind_connector_metadata", "clear_connector_metadata"),
    *("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save"),
    *("get_transfer_results", "get_block_ids_with_load_errors", "build_connector_worker_meta"),
    *("shutdown", "bind_kv_cache_manager", "bind_gpu_block_pool", "get_num_new_matched_tokens"),
    *("update_state_after_alloc", "build_connector_meta", "on_new_request"),
    *("update_connector_output", "request_finished", "request_finished_all_groups"),
    *("register_finished_partial_tail", "has_pending_push_work", "reset_cache"),
)

# Fields and methods that the connector uses of vLLM's own classes.
_USED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        ("num_scheduled_tokens", "kv_connector_block_state"),
    ),
    (
        "vllm.v1.core.sched.output",
        "KVConnectorBlockState",
        ("get_block_ids", "boundary_state_offloads"),
    ),
    (
        "vllm.v1.request",
        "Request",
        (
            *("request_id", "num_tokens", "num_prompt_tokens", "num_computed_tokens"),
            *("block_hashes", "status", "kv_transfer_params", "all_token_ids", "lora_request"),
            *("mm_features", "cache_salt", "prompt_embeds"),
        ),
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
    ("vllm.v1.core.block_pool", "BlockPool", ("blocks", "touch", "free_blocks")),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorTransferResults",
        ("finished_recving", "failed_recving"),
    ),
)


def _parameters(function: Any) -> tuple[str, ...]:
    names = tuple(inspect.signature(function).parameters)
    return names[1:] if names[:1] in (("self",), ("cls",)) else names


def differences(
    ours: type,
    bases: tuple[type, ...],
    used: tuple[tuple[str, str, tuple[str, ...]], ...] = _USED,
) -> list[str]:
    """What differs between vLLM's contract and the one that the connector was written for.

    Args:
        ours: The connector.
        bases: vLLM's base class of connectors, and what it mixes in.
        used: Module, class and members that the connector reads.
    """
    found = []
    for name in _NEEDED:
        if not any(callable(getattr(base, name, None)) for base in bases):
            expected = ", ".join(_parameters(getattr(ours, name)))
            found.append(f"{bases[0].__name__}.{name}: missing, expected ({expected})")
    for base in bases:
        for name, own in vars(ours).items():
            theirs, called = getattr(base, name, None), getattr(ours, name)
            if name.startswith("_") or isinstance(own, property) or not callable(theirs):
                continue
            given, expected = (", ".join(_parameters(each)) for each in (theirs, called))
            if given != expected:
                found.append(f"{base.__name__}.{name}({given}): expected ({expected})")
        for name in sorted(getattr(base, "__abstractmethods__", ())):
            if name not in vars(ours):
                found.append(f"{base.__name__}.{name}: must be defined, and is not known")
    for module_name, class_name, members in used:
        try:
            cls = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError):
            found.append(f"{module_name}.{class_name}: missing")
            continue
        # Fields of a dataclass, or what the constructor sets.
        fields = {*getattr(cls, "__dataclass_fields__", ()), *_names_in(cls.__init__)}
        for member in members:
            if member not in fields and not hasattr(cls, member):
                found.append(f"{module_name}.{class_name}.{member}: missing")
    return found


def _names_in(function: Any) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    return () if code is None else tuple(code.co_names)


@functools.cache
def check_contract(ours: type) -> None:
    """Raises UnsupportedError that names every difference.

    Args:
        ours: The connector.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    found = differences(ours, (KVConnectorBase_V1, SupportsHMA))
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
