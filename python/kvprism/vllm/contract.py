"""Does this vLLM still speak as the connector does? Asked before it is imported and constructed."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any, NoReturn

from .._core import UnsupportedError

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
_STATE = "vllm.distributed.kv_transfer.kv_transfer_state"

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

# Module of vLLM, name in it, and members or parameters.
Uses = tuple[tuple[str, str, tuple[str, ...]], ...]

# Fields and methods that the connector uses of vLLM's own classes.
_USED: Uses = (
    (
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        (
            *("num_scheduled_tokens", "kv_connector_block_state", "has_sync_kv_loads"),
            "preempted_req_ids",
        ),
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
            *("mm_features", "cache_salt", "prompt_embeds", "session_id"),
            "skip_reading_prefix_cache",
        ),
    ),
    (
        "vllm.v1.kv_cache_interface",
        "KVCacheConfig",
        (
            *("num_blocks", "kv_cache_tensors", "kv_cache_groups", "prefix_cacheable_group_ids"),
            *("kv_cache_layout", "prefix_cache_retention_interval"),
        ),
    ),
    (
        "vllm.v1.kv_cache_interface",
        "KVCacheTensor",
        ("size", "layers", "layer_stride", "block_stride", "offset"),
    ),
    (
        "vllm.v1.kv_cache_interface",
        "KVCacheGroupSpec",
        (
            *("layer_names", "kv_cache_spec", "is_eagle_group", "enable_kv_transfer"),
            *("host_resident", "role"),
        ),
    ),
    ("vllm.v1.kv_cache_interface", "AttentionSpec", ("kv_quant_mode", "real_page_size_bytes")),
    ("vllm.v1.kv_cache_interface", "FullAttentionSpec", ("sliding_window", "non_causal")),
    (
        "vllm.v1.kv_cache_interface",
        "SlidingWindowSpec",
        ("sliding_window", "extra_retained_tokens"),
    ),
    ("vllm.v1.kv_cache_interface", "MLAAttentionSpec", ("cache_dtype_str",)),
    (
        "vllm.v1.kv_cache_interface",
        "MambaSpec",
        (
            *("mamba_cache_mode", "num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment"),
            *("tp_replicated", "real_page_size_bytes"),
        ),
    ),
    ("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs", ("kv_cache_specs",)),
    (
        "vllm.config.parallel",
        "ParallelConfig",
        (
            *("rank", "world_size", "tensor_parallel_size", "pipeline_parallel_size"),
            *("prefill_context_parallel_size", "decode_context_parallel_size"),
            *("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size"),
            *("_allow_auto_resolve_cp_interleave_size", "enable_fault_tolerance"),
            *("distributed_executor_backend", "enable_elastic_ep"),
        ),
    ),
    (
        "vllm.config.speculative",
        "SpeculativeConfig",
        ("use_eagle_block_drop", "draft_model_config", "draft_load_config", "method"),
    ),
    (
        "vllm.config.model",
        "ModelConfig",
        (
            *("get_total_num_kv_heads", "enable_sleep_mode", "is_diffusion", "use_mla"),
            *("hf_config", "quantization", "model_impl", "multimodal_config"),
            *("generation_config", "override_generation_config"),
        ),
    ),
    ("vllm.config.multimodal", "MultiModalConfig", ("video_pruning_rate",)),
    ("vllm.config.attention", "AttentionConfig", ("indexer_kv_dtype",)),
    ("vllm.config.load", "LoadConfig", ("load_format",)),
    ("vllm.config.vllm", "VllmConfig", ("kv_events_config",)),
    (
        "vllm.v1.outputs",
        "KVConnectorOutput",
        ("finished_recving", "failed_recving", "invalid_block_ids", "kv_connector_worker_meta"),
    ),
    (
        "vllm.v1.core.block_pool",
        "BlockPool",
        (
            *("blocks", "touch", "free_blocks", "evict_blocks", "hash_block_size"),
            *("cached_block_hash_to_block", "cached_block_hashes_by_block"),
        ),
    ),
    ("vllm.v1.core.block_pool", "BlockHashToBlockMap", ("contain",)),
    ("vllm.v1.core.kv_cache_utils", "KVCacheBlock", ("block_id", "block_hash")),
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks", ("blocks", "get_block_ids")),
    ("vllm.config.scheduler", "SchedulerConfig", ("policy",)),
    (_BASE, "KVConnectorTransferResults", ("finished_recving", "failed_recving")),
    (
        "vllm.distributed.kv_events",
        "BlockStored",
        (
            *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
            *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
            *("kv_cache_spec_sliding_window", "locality", "session_id"),
        ),
    ),
    (
        "vllm.distributed.kv_events",
        "BlockRemoved",
        ("block_hashes", "medium", "group_idx", "locality"),
    ),
    ("vllm.distributed.kv_events", "AllBlocksCleared", ()),
    (
        "vllm.config.kv_transfer",
        "KVTransferConfig",
        ("kv_connector_extra_config", "kv_load_failure_policy", "kv_role", "has_connector"),
    ),
)

# What the connector's modules import when they are imported themselves.
_IMPORTED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        _BASE,
        (
            *("KVConnectorBase_V1", "KVConnectorHandshakeMetadata", "KVConnectorMetadata"),
            *("KVConnectorRole", "KVConnectorTransferResults", "KVConnectorWorkerMetadata"),
            "SupportsHMA",
        ),
    ),
    (_METRICS, ("KVConnectorPromMetrics", "KVConnectorStats")),
    (_STATE, ("get_kv_transfer_group", "has_kv_transfer_group")),
)

# Functions that the connector calls, with their parameters.
_CALLED: Uses = (
    (_BASE, "KVConnectorBase_V1.__init__", ("vllm_config", "role", "kv_cache_config")),
    (
        _METRICS,
        "KVConnectorPromMetrics.__init__",
        ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    ),
    (_STATE, "get_kv_transfer_group", ()),
    (_STATE, "has_kv_transfer_group", ()),
    (
        "vllm.v1.core.kv_cache_utils",
        "resolve_kv_cache_block_sizes",
        ("kv_cache_config", "vllm_config"),
    ),
    (
        "vllm.v1.core.kv_cache_utils",
        "generate_block_hash_extra_keys",
        ("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
    ),
    ("vllm.v1.core.kv_cache_utils", "maybe_convert_block_hash", ("hash_bytes",)),
    (
        "vllm.v1.core.kv_cache_utils",
        "make_block_hash_with_group_id",
        ("block_hash", "group_id"),
    ),
    ("vllm.v1.kv_cache_interface", "get_kv_cache_spec_kind", ("kv_cache_spec",)),
    (
        "vllm.v1.kv_cache_spec_registry",
        "KVCacheSpecRegistry.get_manager_class",
        ("kvcache_spec", "role"),
    ),
    ("vllm.distributed.utils", "get_pp_indices", ("num_hidden_layers", "pp_rank", "pp_size")),
)


def _parameters(function: Any) -> tuple[str, ...]:
    names = tuple(inspect.signature(function).parameters)
    return names[1:] if names[:1] in (("self",), ("cls",)) else names


def differences(
    ours: type,
    bases: tuple[type, ...],
    used: Uses = _USED,
    called: Uses = _CALLED,
) -> list[str]:
    """What differs between vLLM's contract and the one that the connector was written for.

    Args:
        ours: The connector.
        bases: vLLM's base class of connectors, and what it mixes in.
        used: Module, class and members that the connector reads.
        called: Module, function and parameters.
    """
    found = []
    for name in _NEEDED:
        if not any(callable(getattr(base, name, None)) for base in bases):
            expected = ", ".join(_parameters(getattr(ours, name)))
            found.append(f"{bases[0].__name__}.{name}: missing, expected ({expected})")
    for base in bases:
        for name, own in vars(ours).items():
            theirs, own_method = getattr(base, name, None), getattr(ours, name)
            if name.startswith("_") or isinstance(own, property) or not callable(theirs):
                continue
            given, expected = (", ".join(_parameters(each)) for each in (theirs, own_method))
            if given != expected:
                found.append(f"{base.__name__}.{name}({given}): expected ({expected})")
        for name in sorted(getattr(base, "__abstractmethods__", ())):
            if name not in vars(ours):
                found.append(f"{base.__name__}.{name}: must be defined, and is not known")
    return found + _different_names(used, called)


def _different_names(used: Uses, called: Uses) -> list[str]:
    found = []
    for module, name, members in used:
        cls = _named(module, name)
        if cls is None:
            found.append(f"{module}.{name}: missing")
            continue
        # Fields of a dataclass, or what the constructor sets.
        fields = {*getattr(cls, "__dataclass_fields__", ()), *_names_in(cls.__init__)}
        for member in members:
            if member not in fields and not hasattr(cls, member):
                found.append(f"{module}.{name}.{member}: missing")
    for module, name, parameters in called:
        function, expected = _named(module, name), ", ".join(parameters)
        if function is None:
            found.append(f"{module}.{name}: missing, expected ({expected})")
            continue
        given = ", ".join(_parameters(function))
        if given != expected:
            found.append(f"{module}.{name}({given}): expected ({expected})")
    return found


def _named(module: str, name: str) -> Any:
    """Of a module of vLLM; None where it is missing."""
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


def _names_in(function: Any) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    return () if code is None else tuple(code.co_names)


def check_imports(imported: tuple[tuple[str, tuple[str, ...]], ...] = _IMPORTED) -> None:
    """Asked before the connector's modules are imported, which would name one thing and stop.

    Args:
        imported: Module and names.

    Raises:
        UnsupportedError: Something is missing; with every other name that is.
    """
    missing = [
        f"{module}.{name}: missing"
        for module, names in imported
        for name in names
        if _named(module, name) is None
    ]
    if missing:
        _refuse(missing + _different_names(_USED, _CALLED))


@functools.cache
def check_contract(ours: type) -> None:
    """Asked before the connector does anything.

    Args:
        ours: The connector.

    Raises:
        UnsupportedError: With every difference.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    found = differences(ours, (KVConnectorBase_V1, SupportsHMA))
    if found:
        _refuse(found)


def _refuse(found: list[str]) -> NoReturn:
    try:
        from vllm import __version__ as version
    except ImportError:
        version = "unknown"
    lines = "\n  ".join(found)
    raise UnsupportedError(
        f"vLLM {version} differs from the contract that kvprism.vllm was written for "
        f"(0.30 to 0.33):\n  {lines}"
    )
