"""Tiny models with random weights, made here: the same bytes for the same seed.

Weights are drawn with a standard deviation of 1/sqrt(fan in), projections of queries and keys with
twice that: with smaller ones the cache would not influence the output, and damage would go unseen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512

_COMMON = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 65536,
    "attention_bias": False,
}


def _llama(layers: int = 2) -> dict[str, Any]:
    return _COMMON | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "mlp_bias": False,
    }


def _gemma3() -> dict[str, Any]:
    return _COMMON | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 256,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        "query_pre_attn_scalar": 64,
        "use_bidirectional_attention": False,
    }


def _qwen3next() -> dict[str, Any]:
    return _COMMON | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "partial_rotary_factor": 0.25,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


CONFIGS = {
    "llama": _llama(),
    "llama8": _llama(8),
    "gemma3": _gemma3(),
    "qwen3next": _qwen3next(),
    "ring_llama": _llama() | {"architectures": ["RingLlamaForCausalLM"]},
    "ring_qwen3next": _qwen3next() | {"architectures": ["RingQwen3NextForCausalLM"]},
}


def build(name: str, folder: Path, seed: int = 0) -> Path:
    """Writes configuration, tokenizer and weights of a model, unless they are there."""
    path = folder / name
    if (path / "model.safetensors").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIGS[name], indent=1))
    _write_tokenizer(path)
    _write_weights(path, seed)
    return path


def _write_tokenizer(path: Path) -> None:
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "truncation": None,
        "padding": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "w1",
                "eos_token": "w2",
                "pad_token": "w3",
                "unk_token": "w0",
            }
        )
    )


def _write_weights(path: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() < 2:
                continue  # norms and biases keep their own start
            scale = weight[0].numel() ** -0.5
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                scale *= 2
            weight.normal_(0.0, scale)
    tensors = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
