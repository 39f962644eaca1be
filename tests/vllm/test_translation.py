"""Every field of vLLM's spec classes, and what kvprism makes of it; no engine runs."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import kvprism
import pytest
from kvprism.vllm import cache_config
from test_contract import config, specs, vllm_config

__all__ = ["vllm_config"]

# Fields that change nothing, and why.
SILENT = {
    "alignment": "of the page, which is told",
    "block_stride_alignment": "of the memory, whose strides are told with it",
    "cache_role": "the group's role says it",
    "is_draft": "the group is flagged",
    "is_index_group_leader": "which layer computes what others use",
    "mamba_type": "the model's",
    "model_version": "the model's; how it packs a row is the cache's dtype and its bytes",
    "non_causal": "refused by name",
    "non_causal_multi_token_decode": "how drafts are verified",
    "num_heads": "of the states' shapes",
    "storage_block_size": "of the page, which is told",
    "topk_buffer_width": "of the kernel's scratch",
}


def another(name: str, value: Any) -> Any:
    """A value that differs."""
    import torch
    from vllm.v1.kv_cache_interface import KVQuantMode

    special = {
        "cache_dtype_str": "another",
        "dtype": torch.float32 if value is torch.bfloat16 else torch.bfloat16,
        "dtypes": (torch.float16, torch.float16),
        "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR,
        "mamba_cache_mode": "all",
        "page_size_padded": 1 << 20,
        "prefill_checkpoint_alignment": 16,
        "shapes": ((5, 32), (3, 8)),
        "tokens_per_state": Fraction(1, 4) if value == Fraction(1, 2) else 2,
        "max_tp_shards": 1,
    }
    if name in special:
        return special[name]
    if isinstance(value, bool):
        return not value
    if value is None or isinstance(value, int):
        return 640 if value is None else value * 2 if value else 7
    return object()


def is_silent(spec: Any, name: str) -> bool:
    kind = type(spec).__name__
    if kind == "MambaSpec" and name in ("tokens_per_state", "dcp_sharded"):
        return True  # a state has no positions
    if kind.startswith("HiSparse") and name == "dcp_sharded":
        return True  # never stored
    if name in ("sliding_window", "attention_chunk_size"):
        # Of full attention it is a note of what layers look at; all is kept.
        return "Sliding" not in kind and "Chunked" not in kind and kind != "KpoolTailSpec"
    return name in SILENT


@pytest.mark.parametrize("name", list(specs()))
def test_every_field_is_told(name: str) -> None:
    """A field that vLLM adds fails until somebody has decided what it means for the store."""
    spec = specs()[name]
    told = cache_config._one_spec(spec)
    forgotten = []
    for field in dataclasses.fields(spec):
        if not field.init:
            continue
        changed = dataclasses.replace(spec)
        # Around the checks of vLLM's own: the translation is asked, not the class.
        object.__setattr__(changed, field.name, another(field.name, getattr(spec, field.name)))
        same = cache_config._one_spec(changed) == told
        if same != is_silent(spec, field.name):
            forgotten.append(field.name)
    assert forgotten == []


@pytest.mark.parametrize("name", [name for name in specs() if name not in ("hot", "resident")])
def test_a_wrapper_means_what_its_layers_mean(vllm_config: Any, name: str) -> None:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    spec = specs()[name]
    wrapped = UniformTypeKVCacheSpecs(
        block_size=spec.block_size, kv_cache_specs={"other.0": spec, "other.1": spec}
    )
    plain = cache_config.describe(vllm_config, config("full", other=spec), (32, 32), "")
    other = cache_config.describe(vllm_config, config("full", other=wrapped), (32, 32), "")
    assert other.projection.digest == plain.projection.digest
    assert other.schema.fingerprint == plain.schema.fingerprint
    ours, theirs = other.projection.groups()[1], plain.projection.groups()[1]
    assert ours.layer_kinds == theirs.layer_kinds
    assert ours.object_bytes == theirs.object_bytes > 0


def test_only_content_is_moved(vllm_config: Any) -> None:
    """The states' page has 1,024 bytes, of which 560 are theirs."""
    for schema, bytes_each in (("kvprism", 4 * 32 * 4 + 3 * 8 * 2), ("vllm", 1024)):
        described = cache_config.describe(
            vllm_config, config("full", "mamba"), (32, 32), "", key_schema=schema
        )
        row = described.projection.groups()[1]
        assert (row.page_size_bytes, row.object_bytes) == (1024, 2 * bytes_each)


def test_content_of_another_size_than_vllm_says_is_refused(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    translate = cache_config._TRANSLATORS["FullAttentionSpec"]
    monkeypatch.setitem(
        cache_config._TRANSLATORS,
        "FullAttentionSpec",
        lambda spec: translate(spec) | {"num_kv_heads": 1},
    )
    with pytest.raises(kvprism.ConfigError) as caught:
        cache_config.describe(vllm_config, config("full"), (32, 32), "")
    bytes_each = 32 * 2 * 128 * 2
    assert str(caught.value) == (
        "KV cache of this model: 1 problem\n"
        "  kv_cache_groups[0].kv_cache_spec = "
        f"'FullAttentionSpec of {2 * bytes_each} bytes in each block': expected the {bytes_each} "
        "that kvprism makes of its fields "
        "(kvprism.vllm.register_spec() can translate the class otherwise)"
    )


@pytest.mark.parametrize("drops", [True, False])
def test_groups_of_drafts_are_told(vllm_config: Any, drops: bool) -> None:
    """The flag is vLLM's, and so is whether a draft's last block is dropped."""
    import copy

    changed = copy.copy(vllm_config)
    speculative = SimpleNamespace(use_eagle_block_drop=lambda: drops)
    object.__setattr__(changed, "speculative_config", speculative)
    ours = config("full", "window", "mamba")
    ours.kv_cache_groups[1].is_eagle_group = True
    rows = [cache_config._group(group) for group in ours.kv_cache_groups]
    assert [row["is_eagle_group"] for row in rows] == [False, True, False]
    assert cache_config._eagle_drops_blocks(changed) is drops
