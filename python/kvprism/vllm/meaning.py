"""What vLLM's options say of the bytes, beside the groups of the cache: JSON for the keys' digest.

A fact is here if an engine that differs in it may leave other bytes under the same block hash.
tests/vllm/test_meaning.py goes through every option of vLLM and knows why the others are not.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .problems import Problems

# Variables of vLLM that no option of its configuration repeats, and that change values or how
# a page is packed.
ENVIRONMENT = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4",  # 0.30
    "VLLM_VIDEO_LOADER_BACKEND",
)

# Where a model lies and who wrote its file do not change what it computes.
_WITHOUT_MEANING = ("_name_or_path", "name_or_path", "transformers_version")


def as_json(value: Any) -> Any:
    """The value as JSON that is the same in every process."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(k): as_json(v) for k, v in value.items() if k not in _WITHOUT_MEANING}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value):
        # What is left at its default does not tell: newer versions have more fields.
        return {
            field.name: as_json(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != field.default
        }
    # Others may print their address; PyTorch's dtypes are the ones that occur, and functions.
    text = str(value)
    if text.startswith("torch."):
        return text
    if callable(value) and hasattr(value, "__qualname__"):
        # The same file under its name in a spawned process.
        module = "__main__" if value.__module__ == "__mp_main__" else value.__module__
        return f"{module}.{value.__qualname__}"
    return type(value).__name__


def facts_of_options(vllm_config: Any) -> dict[str, Any]:
    """Every fact; what is at vLLM's default or has no effect is None."""
    model = vllm_config.model_config
    return {
        "config": as_json(_as_given(_config_of(model))),
        # Also of what models write: that much of the configuration above is left out.
        "overrides": _chosen(model, "hf_overrides", "hf_config_path"),
        "platform": _platform(),
        "code": _code(model),
        "loaded": _loaded(vllm_config, vllm_config.load_config, model),
        "positions": _long_rope(model),
        "tuned": _tuned(model),
        "draft": _draft(vllm_config),
        "attention": _attention(vllm_config.attention_config),
        "media": _media(model),
        "adapters": _adapters(vllm_config),
        "states": _states(vllm_config.cache_config),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        or None,
        # A wrapper's key knows its first layer alone.
        "unquantized_layers": sorted(vllm_config.cache_config.kv_cache_dtype_skip_layers) or None,
    }


def agreed(told: Mapping[tuple[int, int], Mapping[str, Any]]) -> Mapping[str, Any]:
    """What all ranks say that the bytes mean.

    Args:
        told: Pipeline and tensor rank to what the rank says; at least one.

    Raises:
        ConfigError: With everything in which a rank differs from the first.
    """
    (first, words), *others = sorted(told.items())
    wanted, problems = dict(_leaves(words, "")), Problems()
    for rank, each in others:
        found = dict(_leaves(each, ""))
        for path in sorted(wanted.keys() | found.keys()):
            if found.get(path) != wanted.get(path):
                expected = f"{wanted.get(path)!r}, as on rank {first}"
                problems.add(f"rank {rank}: {path}", found.get(path), expected)
    problems.raise_if_any("what ranks say of their bytes")
    return words


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, part in value.items():
        yield from _leaves(part, f"{path}.{name}" if path else name)


def _config_of(model: Any) -> Any:
    """Also what the user overrides, such as the scaling of positions."""
    to_dict = getattr(getattr(model, "hf_config", None), "to_dict", None)
    return None if to_dict is None else to_dict()


# What models of vLLM 0.30 to 0.33 write into their configuration while a worker makes them: it
# follows from other keys, from the weights or from other facts here. Where workers tell the
# scheduler what they have, nothing had to be left out; inside MultiConnector they do not.
WRITTEN_BY_MODELS = {
    "architectures",
    "attention_k_eq_v",
    "attn_temperature_tuning",
    "bias",
    "dtype",
    "expert_hidden_dim",
    "fope_init_factor",
    "fope_sep_head",
    "hidden_act",
    "image_token_id",
    "image_token_index",
    "intermediate_size",
    "is_mm_prefix_lm",
    "logits_scaling",
    "max_model_len",
    "media_placeholder_token_id",
    "mlp_bias",
    "mlp_layer_types",
    "n_group",
    "num_experts",
    "num_inv_freq",
    "num_labels",
    "num_ln_in_parallel_attn",
    "num_shared_experts",
    "partial_rotary_factor",
    "projector_hidden_act",
    "rope_type",
    "route_norm",
    "router_scaling_factor",
    "topk_group",
    "torch_dtype",
    "use_fope",
    "use_sep_token",
    "vision_config",
}


def _as_given(config: Any) -> Any:
    """A model's configuration without what the model has written into it."""
    if not isinstance(config, Mapping):
        return config
    return {
        key: _as_given(value)
        for key, value in config.items()
        if key not in WRITTEN_BY_MODELS and str(key)[:1] != "_"
    }


def attends_sparsely(model: Any) -> bool:
    """Whether an indexer chooses what attention reads."""
    return any("index_topk" in part for part in _parts(_config_of(model)))


def _parts(config: Any) -> Iterator[Mapping[str, Any]]:
    """A configuration and those inside it."""
    if isinstance(config, Mapping):
        yield config
        for value in config.values():
            yield from _parts(value)


def _chosen(part: Any, *names: str) -> dict[str, Any] | None:
    """The named options that say something."""
    values = {name: getattr(part, name, None) for name in names}
    return {name: as_json(value) for name, value in values.items() if value} or None


def _code(model: Any) -> dict[str, Any] | None:
    """Which code computes the model."""
    found = _chosen(model, "code_revision", "model_class_overrides") or {}
    implementation = getattr(model, "model_impl", "auto")
    if implementation != "auto":
        found["model_impl"] = str(implementation)
    return found or None


def _loaded(vllm_config: Any, load: Any, model: Any) -> dict[str, Any] | None:
    """What becomes of the weights on the way from their file."""
    found = _chosen(model, "model_weights", "quantization_config") or {}
    # Other formats read the same weights. A worker that joins an engine writes "dummy" here, and
    # then gets the weights of the others: vLLM marks its process.
    joins = (
        vllm_config.parallel_config.enable_elastic_ep
        and os.environ.get("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH") == "1"
    )
    if getattr(load, "load_format", None) == "dummy" and not joins:
        found["load_format"] = "dummy"
    return found or None


def _long_rope(model: Any) -> list[bool | str] | None:
    """Of each set of rotary factors with a short and a long half: whether the long one is used.

    vLLM decides by the longest length that this engine serves, when the model is made. A length
    that is fitted to the memory is set later, so that it does not tell.
    """
    fitted = getattr(model, "original_max_model_len", None) == -1
    originals = sorted(set(_originals(_config_of(model) or {}, None)))
    return ["fitted" if fitted else model.max_model_len > each for each in originals] or None


# Above it vLLM tunes the temperature of Llama 4's attention, where generation does not say.
_LLAMA_4_TUNED_ABOVE = 32_768


def _tuned(model: Any) -> bool | list[Any] | None:
    """Whether Llama 4 tunes its attention, as far as the engine's options decide it."""
    kinds = [str(part.get("model_type")) for part in _parts(_config_of(model))]
    if not any(kind.startswith("llama4") for kind in kinds):
        return None
    told = (getattr(model, "override_generation_config", None) or {}).get("attn_temperature_tuning")
    if told is not None:
        return bool(told)
    fitted = getattr(model, "original_max_model_len", None) == -1
    length = "fitted" if fitted else model.max_model_len > _LLAMA_4_TUNED_ABOVE
    return [str(getattr(model, "generation_config", "auto")), length]


def _originals(config: Mapping[str, Any], outer: int | None) -> Iterator[int]:
    """Lengths up to which short factors serve."""
    original = config.get("original_max_position_embeddings") or outer
    if "longrope" in (config.get("rope_type"), config.get("type")) and original is not None:
        yield int(original)
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _originals(value, original)


def _platform() -> list[str] | None:
    """Where attention packs pages in the processor's own way, and what its fp8 is; None: CUDA."""
    import vllm.platforms

    current_platform = vllm.platforms.current_platform
    if current_platform.is_cuda():
        return None
    # ROCm's fp8 is another one before gfx950.
    found = [str(current_platform.device_name), str(current_platform.fp8_dtype())]
    if current_platform.is_cpu():
        import torch

        # Keys and values lie in AMX's tiles where it has them, else by rows.
        tiles = getattr(torch.cpu, "_is_amx_tile_supported", None)
        found.append(current_platform.get_cpu_architecture().name)
        found.append("amx" if tiles is not None and tiles() else "")
    return found


# Drafts that are found among the tokens: no model, no cache.
_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")


def _draft(vllm_config: Any) -> dict[str, Any] | None:
    """The model whose cache lies beside the target's."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or getattr(speculative, "method", None) in _WITHOUT_MODEL:
        return None
    aux = getattr(getattr(draft, "hf_config", None), "eagle_aux_hidden_state_layer_ids", None)
    return {
        "model": str(draft.model),
        "revision": draft.revision,
        "aux_layers": as_json(aux),
        "positions": _long_rope(draft),
        "loaded": _loaded(vllm_config, getattr(speculative, "draft_load_config", None), draft),
        "options": _chosen(
            speculative,
            "method",
            "code_revision",
            "quantization",
            "kv_cache_dtype",
            "attention_backend",
            "parallel_drafting",
            "index_share_for_mtp_iteration",
        ),
    }


def _attention(attention: Any) -> dict[str, Any] | None:
    """Who writes the cache, where one is chosen: backends pack it in their own ways."""
    found = _chosen(attention, "backend", "backend_per_kind", "use_non_causal") or {}
    indexer = getattr(attention, "indexer_kv_dtype", "auto")
    if indexer != "auto":
        found["indexer_kv_dtype"] = str(indexer)
    return found or None


def _media(model: Any) -> dict[str, Any] | None:
    """What is made of pictures and sounds: their hashes know what a request asks for alone."""
    media = getattr(model, "multimodal_config", None)
    if media is None:
        return None
    names = ("mm_processor_kwargs", "media_io_kwargs")
    found = _chosen(media, *names, "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path") or {}
    if getattr(media, "video_pruning_rate", None):
        found["pruning"] = [str(media.video_pruning_method), media.video_pruning_rate]
    return found or None


def _adapters(vllm_config: Any) -> dict[str, Any] | None:
    """What is used of an adapter; hashes know its name and, since vLLM 0.31, its path."""
    adapters = vllm_config.lora_config
    if adapters is None:
        return None
    found: dict[str, Any] = {}
    modules: Collection[str] | None = adapters.target_modules
    if modules is not None:
        found["target_modules"] = sorted(modules)
    if adapters.enable_tower_connector_lora:
        found["tower"] = True
    if adapters.lora_dtype not in ("auto", None, vllm_config.model_config.dtype):
        found["dtype"] = str(adapters.lora_dtype)
    return found or None


def _states(cache: Any) -> dict[str, Any] | None:
    """States that are brought up to date some tokens later."""
    found = _chosen(cache, "use_replayssm", "use_kda_recoverssm") or {}
    if "use_replayssm" in found:
        found["replayssm_buffer_len"] = cache.replayssm_buffer_len
    return found or None
