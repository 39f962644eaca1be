"""Which of vLLM's options are in the keys, and why the others need not be."""

from __future__ import annotations

import copy
import dataclasses
import enum
import re
from types import SimpleNamespace
from typing import Any

import conftest
import kvprism
import pytest
from kvprism.vllm import cache_config, meaning
from test_contract import config, specs

# Options that change the bytes under a block hash, each with another value than the default.
MEANS: dict[str, dict[str, Any]] = {
    "CacheConfig": {
        "cache_dtype": "fp8",
        "prefix_caching_hash_algo": "sha256_cbor",
        "kv_cache_dtype_skip_layers": ["3", "5"],
        "use_replayssm": True,
        "use_kda_recoverssm": True,
    },
    "ModelConfig": {
        "model": "/another/model",
        "model_weights": "s3://another/model",
        "revision": "v2",
        "code_revision": "v2",
        "dtype": "torch.float16",
        "hf_config": SimpleNamespace(to_dict=lambda: {"rope_theta": 12345.0}),
        "hf_overrides": {"hidden_act": "gelu"},
        "hf_config_path": "/another/config",
        "quantization": "fp8",
        "quantization_config": {"ignore": ["lm_head"]},
        "model_impl": "transformers",
        "model_class_overrides": {"Any": "another.module:Class"},
    },
    "MultiModalConfig": {
        "mm_processor_kwargs": {"images_kwargs": {"size": 512}},
        "media_io_kwargs": {"video": {"num_frames": 40}},
        "video_pruning_rate": 0.5,
        "mm_encoder_attn_dtype": "fp8",
        "mm_encoder_fp8_scale_path": "/a/file",
    },
    "SpeculativeConfig": {
        "method": "extract_hidden_states",
        "code_revision": "v2",
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "attention_backend": "FLASH_ATTN",
        "parallel_drafting": True,
        "index_share_for_mtp_iteration": True,
        "draft_load_config": SimpleNamespace(load_format="dummy"),
        "draft_model_config": SimpleNamespace(
            model="/a/draft",
            revision=None,
            hf_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=[2, 5]),
        ),
    },
    "ParallelConfig": {},
    "AttentionConfig": {
        "backend": "FLASH_ATTN",
        "backend_per_kind": {"mla_attention": "TRITON_MLA"},
        "indexer_kv_dtype": "mxfp4",
        "use_non_causal": True,
    },
    "LoadConfig": {"load_format": "dummy"},
    "LoRAConfig": {
        "lora_dtype": "torch.float16",
        "target_modules": ["o_proj"],
        "enable_tower_connector_lora": True,
    },
}

# Options that change the bytes only together with others: tests of their own.
WITH_OTHERS = {
    "CacheConfig": {"enable_prefix_caching", "replayssm_buffer_len"},
    "ModelConfig": {"max_model_len", "generation_config", "override_generation_config"},
    "MultiModalConfig": {"video_pruning_method"},
    "ParallelConfig": {
        "pipeline_parallel_size",
        "tensor_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "cp_kv_cache_interleave_size",
        "dcp_kv_cache_interleave_size",
        "_allow_auto_resolve_cp_interleave_size",
    },
}

# The others do not change them, because this is what they decide.
OTHERWISE: dict[str, dict[str, str]] = {
    "CacheConfig": {
        "the specs of the groups": "block_size user_specified_block_size sliding_window "
        "mamba_page_size_padded skip_page_size_padded mamba_block_size mamba_cache_dtype "
        "mamba_ssm_cache_dtype mamba_cache_mode swa_bounded_replay is_attention_free "
        "user_specified_mamba_block_size _block_size_resolved",
        "facts of the projection": "kv_cache_layout prefix_match_unit hash_block_size "
        "cache_hit_alignment_tokens",
        "how much memory there is": "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks "
        "num_cpu_blocks effective_attention_block_size kv_cache_size_tokens "
        "kv_cache_max_concurrency kv_cache_memory_bytes kv_offloading_size kv_offloading_backend "
        "simple_cpu_offload_num_blocks",
        "what is kept": "prefix_cache_retention_interval enable_mamba_shared_prefix_checkpoint "
        "enable_mamba_fine_grained_prefix_cache",
        "layers that have no cache of their own": "kv_sharing_fast_prefill",
    },
    "ModelConfig": {
        "what is made of the answer": "runner convert pooler_config logits_processors "
        "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay "
        "seed word_embeddings_untied_by_checkpoint "
        "enable_return_routed_experts served_model_name io_processor_plugin",
        "the tokens, which are in the hash": "tokenizer tokenizer_mode tokenizer_revision "
        "skip_tokenizer_init enable_prompt_embeds",
        "what comes to be in hf_config": "hf_text_config config_format is_submodel_config",
        "the specs of the groups": "disable_sliding_window",
        "who may do what": "trust_remote_code allowed_local_media_path allowed_media_domains "
        "hf_token allow_deprecated_quantization",
        "how it runs, which may round otherwise": "enforce_eager disable_cascade_attn "
        "renderer_num_workers",
        "sleep, which is refused": "enable_sleep_mode sleep_preserve_parameter_names "
        "sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend "
        "enable_cumem_allocator",
        "how far drafts go": "spec_target_max_model_len",
        "a class of its own": "multimodal_config",
    },
    "MultiModalConfig": {
        "what may be asked for": "language_model_only limit_per_prompt enable_mm_embeds "
        "allow_missing_mm_embeddings mm_encoder_only",
        "the hash": "mm_hasher_algorithm",
        "the tokens, which are in the hash": "interleave_mm_strings",
        "where it is worked on, which may round otherwise": "mm_device_do_normalize "
        "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
        "mm_encoder_tp_mode mm_encoder_attn_backend mm_tensor_ipc mm_ipc_gpu_memory_gb "
        "skip_mm_profiling",
        "a file that is written": "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
    },
    "SpeculativeConfig": {
        "what comes to be in draft_model_config": "model revision max_model_len "
        "target_model_config draft_lm_head_quantization",
        "how many drafts, and which are taken": "num_speculative_tokens use_heterogeneous_vocab "
        "num_speculative_tokens_per_batch_size rejection_sample_method "
        "synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification "
        "draft_sample_method dspark_draft_topk xpress_topc fly_window_size fly_entropy_threshold "
        "fly_entropy_top_k",
        "drafts without a model": "prompt_lookup_max prompt_lookup_min "
        "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
        "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob",
        "where hits end": "disable_eagle_block_drop disable_lookahead_block_hashes",
        "how it runs, which may round otherwise": "enforce_eager moe_backend "
        "draft_tensor_parallel_size tensor_parallel_size draft_parallel_config "
        "target_parallel_config disable_padded_drafter_batch use_local_argmax_reduction",
    },
    "ParallelConfig": {
        "which engine it is": "data_parallel_size data_parallel_size_local data_parallel_rank "
        "data_parallel_rank_local data_parallel_index data_parallel_external_lb "
        "data_parallel_hybrid_lb rank world_size node_rank nnodes",
        "how processes find each other": "data_parallel_master_ip data_parallel_rpc_port "
        "data_parallel_master_port data_parallel_backend master_addr master_port "
        "_data_parallel_master_port_list _coord_store_port distributed_timeout_seconds "
        "cpu_distributed_timeout_seconds _api_process_count _api_process_rank "
        "disable_nccl_for_dp_synchronization dp_sync_interval",
        "where processes run": "ray_workers_use_nsight ray_runtime_env placement_group "
        "distributed_executor_backend worker_cls worker_extension_cls sd_worker_cls numa_bind "
        "numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids max_parallel_loading_workers "
        "enable_elastic_ep elastic_ep_max_dp_size enable_fault_tolerance fault_tolerance_config",
        "where experts lie": "is_moe_model enable_expert_parallel enable_ep_weight_filter "
        "enable_eplb eplb_config expert_placement_strategy",
        "how it runs, which may round otherwise": "enable_hc_sp all2all_backend "
        "disable_custom_all_reduce enable_shm_tensor_arena enable_dbo ubatch_size "
        "dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend dcp_q_replicate "
        "enable_batch_sharded_sampling",
    },
    "AttentionConfig": {
        "how it is computed, which may round otherwise": "minimax_m3_msa_decode_backend "
        "flash_attn_version flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
        "tq_max_kv_splits_for_cuda_graph use_trtllm_attention disable_flashinfer_q_quantization "
        "mla_prefill_backend use_prefill_query_quantization indexer_sparse_logits "
        "sparse_mla_force_mqa sparse_mla_prefill_workspace_factor flex_attn_block_m "
        "flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size trtllm_ragged_backend "
        "indexer_tp_shard_min_rows minimax_m3_indexer_cp",
        "the specs of the groups": "hisparse_config",
    },
    "LoadConfig": {
        "how and from where files are read: weights are not in keys": "download_dir "
        "safetensors_load_strategy safetensors_prefetch_num_threads "
        "safetensors_prefetch_block_size model_loader_extra_config device ignore_patterns "
        "use_tqdm_on_load pt_load_map_location",
    },
    "LoRAConfig": {
        "how many there are": "max_lora_rank max_loras max_cpu_loras max_lora_cls_labels",
        "names and paths, which are in the hash": "default_mm_loras",
        "how it runs, which may round otherwise": "fully_sharded_loras specialize_active_lora",
        "how a file is read": "enable_mixed_moe_lora_format enable_moe_shared_loras",
    },
    "VllmConfig": {
        "a class of its own": "model_config cache_config parallel_config load_config "
        "attention_config lora_config speculative_config",
        "what comes to be in hf_config": "quant_config",
        "how it runs, which may round otherwise": "scheduler_config device_config offload_config "
        "engram_config mamba_config kernel_config compilation_config optimization_level "
        "performance_mode",
        "what is told": "observability_config logging_config profiler_config kv_events_config "
        "instance_id aux_output_config watchdog_config",
        "what is made of the answer": "watermark_config diffusion_config "
        "structured_outputs_config reasoning_config",
        "how caches and weights come here": "kv_transfer_config ec_transfer_config "
        "ec_manager_config weight_transfer_config",
        "what a plugin makes of it": "additional_config",
        "how long an end takes": "shutdown_timeout",
    },
}


# Variables of vLLM whose names sound as if they changed bytes.
SUSPECT = re.compile(
    "QUANT|DTYPE|INT4|INT8|FP4|FP8|MXFP|KV_CACHE|LAYOUT|VIDEO|AUDIO|ROUTING|SIMULAT|A[0-9]+W[0-9]+|SITU"
)
OTHER_VARIABLES = {
    "what may be started": "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
    "what may be asked for": "VLLM_AUDIO_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT "
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_BYTES "
    "VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_PREPROCESS_WORKERS",
    "how it is computed, which may round otherwise": "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER "
    "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD "
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_ROCM_FP8_MFMA_PAGE_ATTN VLLM_ROCM_FP8_PADDING "
    "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE "
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB VLLM_ROCM_USE_AITER_FP4BMM "
    "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_ROCM_USE_AITER_FP8BMM VLLM_USE_FLASHINFER_MOE_INT4",
    "facts of the projection": "VLLM_KV_CACHE_LAYOUT VLLM_SSM_CONV_STATE_LAYOUT",
}


def class_of(name: str) -> Any:
    import vllm.config
    from vllm.config import lora, multimodal, speculative

    for module in (vllm.config, lora, multimodal, speculative):
        if hasattr(module, name):
            return getattr(module, name)
    raise LookupError(name)


@pytest.mark.parametrize("name", sorted({*MEANS, *OTHERWISE}))
def test_every_option_of_vllm_is_in_the_keys_or_does_not_change_the_bytes(name: str) -> None:
    """A new option of a new vLLM fails here: decide, then add it to meaning.py or to a table."""
    options = {field.name for field in dataclasses.fields(class_of(name))}
    tables = [
        *MEANS.get(name, {}),
        *WITH_OTHERS.get(name, ()),
        *(option for row in OTHERWISE[name].values() for option in row.split()),
    ]
    assert options - set(tables) == set()
    assert len(tables) == len(set(tables)), "an option is in two tables"


def test_every_variable_of_vllm_that_may_change_the_bytes_is_in_the_keys() -> None:
    import vllm.envs

    suspect = {name for name in vllm.envs.environment_variables if SUSPECT.search(name)}
    rows = {name for row in OTHER_VARIABLES.values() for name in row.split()}
    assert rows.isdisjoint(meaning.ENVIRONMENT)
    assert suspect - rows - set(meaning.ENVIRONMENT) == set()


@pytest.mark.parametrize("name", meaning.ENVIRONMENT)
def test_a_variable_that_changes_the_bytes_changes_the_keys(
    name: str, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in meaning.ENVIRONMENT:
        monkeypatch.delenv(each, raising=False)
    plain = fingerprint(vllm_config)
    seen = {plain}
    for value in ("int8", "fp8"):
        monkeypatch.setenv(name, value)
        seen.add(fingerprint(vllm_config))
    assert len(seen) == 3


@pytest.mark.parametrize(
    "fact", ["amx", "architecture", "platform", "fp8"], ids=lambda fact: str(fact)
)
def test_a_processor_that_packs_otherwise_has_other_keys(
    fact: str, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm.platforms import current_platform

    tiles = torch.cpu._is_amx_tile_supported()
    plain = fingerprint(vllm_config)
    platform = type(current_platform)
    place, name, value = {
        "amx": (torch.cpu, "_is_amx_tile_supported", lambda: not tiles),
        "architecture": (platform, "get_cpu_architecture", lambda: SimpleNamespace(name="ARM")),
        "platform": (platform, "device_name", "another"),
        "fp8": (platform, "fp8_dtype", lambda: torch.float8_e4m3fnuz),
    }[fact]
    monkeypatch.setattr(place, name, staticmethod(value) if callable(value) else value)
    assert fingerprint(vllm_config) != plain
    if fact == "platform":
        monkeypatch.setattr(platform, "is_cuda", staticmethod(lambda: True))
        assert meaning.facts_of_options(vllm_config)["platform"] is None


def test_functions_that_change_a_configuration_are_told_apart(vllm_config: Any) -> None:
    def one(config: Any) -> Any:
        return config

    def another(config: Any) -> Any:
        return config

    seen = {fingerprint(vllm_config, hf_overrides=each) for each in (None, one, another)}
    assert len(seen) == 3
    # One of the script that starts vLLM, in its own process, in a forked and in a spawned one.
    one.__module__ = another.__module__ = "__main__"
    another.__qualname__ = one.__qualname__
    of_script = fingerprint(vllm_config, hf_overrides=one)
    another.__module__ = "__mp_main__"
    assert fingerprint(vllm_config, hf_overrides=another) == of_script


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(conftest.model("llama")), enforce_eager=True, block_size=32
    ).create_engine_config()


def changed(vllm_config: Any, name: str, options: dict[str, Any]) -> Any:
    """A copy of the configuration with options of one of its parts."""
    new = copy.copy(vllm_config)
    for part in ("model_config", "cache_config", "attention_config", "load_config"):
        setattr(new, part, copy.copy(getattr(vllm_config, part)))
    draft = SimpleNamespace(model="/a/draft", revision=None, hf_config=None)
    speculative = SimpleNamespace(draft_model_config=draft, use_eagle_block_drop=lambda: False)
    place = {
        "CacheConfig": new.cache_config,
        "ModelConfig": new.model_config,
        "AttentionConfig": new.attention_config,
        "LoadConfig": new.load_config,
        "MultiModalConfig": SimpleNamespace(video_pruning_method="evs"),
        "SpeculativeConfig": speculative,
        "LoRAConfig": SimpleNamespace(
            lora_dtype=new.model_config.dtype,
            target_modules=None,
            enable_tower_connector_lora=False,
        ),
    }[name]
    where = {
        "MultiModalConfig": (new.model_config, "multimodal_config"),
        "SpeculativeConfig": (new, "speculative_config"),
        "LoRAConfig": (new, "lora_config"),
    }
    if name in where:
        owner, attribute = where[name]
        object.__setattr__(owner, attribute, place)
    for option, value in options.items():
        object.__setattr__(place, option, value)
    return new


def fingerprint(vllm_config: Any, name: str = "ModelConfig", **options: Any) -> str:
    new = changed(vllm_config, name, options)
    return str(cache_config.describe(new, config("full"), (32, 32), "").schema.fingerprint)


@pytest.mark.parametrize("name", sorted(name for name, means in MEANS.items() if means))
def test_what_changes_the_bytes_changes_the_keys(vllm_config: Any, name: str) -> None:
    plain = fingerprint(vllm_config, name)
    if name != "SpeculativeConfig":
        assert plain == fingerprint(vllm_config), "a part whose options are the defaults"
    seen = [plain, *(fingerprint(vllm_config, name, **{k: v}) for k, v in MEANS[name].items())]
    assert len(set(seen)) == len(seen)


def test_what_does_not_change_the_bytes_leaves_the_keys_alone(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    media, drafts, adapters = "MultiModalConfig", "SpeculativeConfig", "LoRAConfig"
    plain = fingerprint(vllm_config)
    assert fingerprint(vllm_config, media, mm_processor_kwargs={}, media_io_kwargs={}) == plain
    assert fingerprint(vllm_config, media, video_pruning_method="vidcom2") == plain
    assert fingerprint(vllm_config, media, mm_processor_cache_gb=0) == plain
    for method in ("ngram", "ngram_gpu", "suffix"):
        assert fingerprint(vllm_config, drafts, method=method) == plain, "no draft has a cache"
    drafted = fingerprint(vllm_config, drafts)
    assert fingerprint(vllm_config, drafts, num_speculative_tokens=3) == drafted
    assert fingerprint(vllm_config, adapters, max_loras=4) == plain
    assert fingerprint(vllm_config, "LoadConfig", load_format="safetensors") == plain
    assert fingerprint(vllm_config, "CacheConfig", replayssm_buffer_len=8) == plain
    # What a worker writes that joins a running engine, and then gets the weights of the others.
    grows = copy.copy(vllm_config)
    grows.parallel_config = copy.copy(vllm_config.parallel_config)
    object.__setattr__(grows.parallel_config, "enable_elastic_ep", True)
    assert fingerprint(grows, "LoadConfig", load_format="dummy") != plain
    monkeypatch.setenv("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", "1")
    assert fingerprint(grows, "LoadConfig", load_format="dummy") == plain
    assert fingerprint(vllm_config, "LoadConfig", load_format="dummy") != plain


def test_options_that_matter_beside_another(vllm_config: Any) -> None:
    pruned = {"video_pruning_rate": 0.5}
    assert fingerprint(
        vllm_config, "MultiModalConfig", **pruned, video_pruning_method="evs"
    ) != fingerprint(vllm_config, "MultiModalConfig", **pruned, video_pruning_method="vidcom2")
    late = {"use_replayssm": True}
    assert fingerprint(vllm_config, "CacheConfig", **late, replayssm_buffer_len=8) != fingerprint(
        vllm_config, "CacheConfig", **late, replayssm_buffer_len=16
    )


@pytest.mark.parametrize("place", ["rope_parameters", "outside", "by layer", "text_config"])
def test_the_longest_length_counts_where_it_chooses_rotary_factors(
    vllm_config: Any, place: str
) -> None:
    before = vllm_config.model_config.hf_config.to_dict()
    kinds: dict[str, Any] = {
        "rope_parameters": {
            "rope_parameters": {
                "rope_type": "longrope",
                "original_max_position_embeddings": 4096,
            }
        },
        "outside": {
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope"},
        },
        "by layer": {
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 4096,
                },
                "sliding_attention": {"rope_type": "default"},
            }
        },
    }
    kinds["text_config"] = {"text_config": kinds["rope_parameters"]}

    def keys(length: int, original: int | None, **changes: Any) -> str:
        model = SimpleNamespace(to_dict=lambda: before | changes)
        return fingerprint(
            vllm_config, hf_config=model, max_model_len=length, original_max_model_len=original
        )

    long = kinds[place]
    short = keys(4096, 4096, **long)
    assert keys(2048, None, **long) == short
    assert keys(4097, 4097, **long) not in (short, keys(4096, 4096))
    assert keys(4097, None, **long) == keys(131072, 131072, **long)
    # A length that is fitted to the memory comes when the factors are chosen already.
    assert keys(4096, -1, **long) == keys(4097, -1, **long) != short
    # Of other models the longest length says nothing.
    assert keys(4096, 4096) == keys(4097, 4097) == keys(8192, -1)


def test_a_quantisation_is_told_by_all_that_it_says(vllm_config: Any) -> None:
    from vllm.config import quantization

    def keys(**options: Any) -> str:
        given = quantization.QuantizationConfigArgs(**options)
        return fingerprint(vllm_config, quantization_config=given)

    one = keys(linear="fp8_per_tensor")
    assert keys(linear="fp8_per_tensor") == one
    others = [
        keys(linear="fp8_per_block"),
        keys(moe="fp8_per_tensor"),
        keys(linear="fp8_per_tensor", ignore=["lm_head"]),
    ]
    assert len({one, *others}) == 4


def test_what_a_prefix_does_not_say_is_refused(vllm_config: Any) -> None:
    """Numbered pictures, and layers that read ahead, in a group or in a wrapper."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    off = changed(vllm_config, "CacheConfig", {"enable_prefix_caching": False})
    causal = specs()["full"]
    ahead = dataclasses.replace(causal, non_causal=True)
    wrapped = UniformTypeKVCacheSpecs(
        block_size=32, kv_cache_specs={"full.0": causal, "full.1": ahead}
    )
    with pytest.raises(kvprism.ConfigError) as caught:
        cache_config.describe(off, config("full"), (32, 32), "")
    assert "cache_config.enable_prefix_caching = False: expected True (" in str(caught.value)
    for spec in (ahead, wrapped):
        # vLLM has switched prefix caching off for their sake.
        with pytest.raises(kvprism.ConfigError) as caught:
            cache_config.describe(off, config("window", full=spec), (32, 32), "")
        assert "1 problem" in str(caught.value)
        assert "kv_cache_groups[1].kv_cache_spec.non_causal = True: expected" in str(caught.value)


def test_a_diffusion_model_is_refused(vllm_config: Any) -> None:
    """Some of its requests are answered without writing the tokens that vLLM caches."""
    diffuses = changed(vllm_config, "ModelConfig", {})
    given = copy.copy(diffuses.model_config.hf_config)
    given.canvas_length = 32
    diffuses.model_config.hf_config = given
    diffuses.model_config.__dict__.pop("is_diffusion", None)  # which vLLM keeps
    cache_config.describe(vllm_config, config("full"), (32, 32), "")
    with pytest.raises(kvprism.ConfigError) as caught:
        cache_config.describe(diffuses, config("full"), (32, 32), "")
    assert "1 problem" in str(caught.value)
    assert "model_config.is_diffusion = True: expected" in str(caught.value)


def test_facts_are_the_same_in_every_process() -> None:
    class Odd:
        """Prints its address."""

    class Kind(enum.Enum):
        ONE = 1

    noted = meaning.as_json(
        {"a": Odd(), "b": (1, 2.5, None, True), "_name_or_path": "/x", 3: Kind.ONE, "c": {"z", "y"}}
    )
    assert noted == {"a": "Odd", "b": [1, 2.5, None, True], "3": "ONE", "c": ["y", "z"]}
