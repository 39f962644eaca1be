"""The gallery's groups as vLLM's own classes: same projections, block sizes and bytes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvprism
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "gallery"


def spec_of(group: dict[str, Any]) -> Any:
    """vLLM's spec for the keys of a group, or of a member of a wrapper."""
    import torch
    from vllm.v1 import kv_cache_interface as v

    if group["kind"] == "uniform":
        members = {name: spec_of(m) for m in group["members"] for name in m["layers"]}
        size = next(iter(members.values())).block_size
        ordered = {name: members[name] for name in group["layers"]}
        return v.UniformTypeKVCacheSpecs(block_size=size, kv_cache_specs=ordered)
    if group["kind"] == "mamba":
        return v.MambaSpec(
            block_size=group["block_size"],
            shapes=tuple(map(tuple, group["shapes"])),
            dtypes=tuple(getattr(torch, dtype) for dtype in group["dtypes"]),
            page_size_padded=group.get("page_size_padded"),
            mamba_cache_mode=group["mamba_cache_mode"],
        )
    compression = group.get("compression", 1)
    opaque = group["dtype"] == "opaque"
    fields: dict[str, Any] = {
        "block_size": group["block_size"] * compression,
        "tokens_per_state": compression,
        "num_kv_heads": group["num_kv_heads"],
        "head_size": group["head_size"],
        "dtype": torch.uint8 if opaque else getattr(torch, group["dtype"]),
        "state_content_bytes": group.get("state_content_bytes"),
    }
    extra = {
        "full_attention": (v.FullAttentionSpec, ()),
        "mla_attention": (v.MLAAttentionSpec, ()),
        "sliding_window": (v.SlidingWindowSpec, ("sliding_window",)),
        "chunked_local_attention": (v.ChunkedLocalAttentionSpec, ("attention_chunk_size",)),
        "circular_buffer": (v.CircularBufferSpec, ("head_size_v",)),
    }
    made, keys = extra[group["kind"]]
    return made(**fields | {key: group[key] for key in keys})


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.stem)
def test_projections_sizes_and_bytes(path: Path) -> None:
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    config = json.loads(path.read_text("utf-8"))
    projection = kvprism.Projection(kvprism.CacheConfig.from_dict(config))
    specs = [spec_of(group) for group in config["groups"]]
    theirs = KVCacheConfig(
        num_blocks=config["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(group["layers"], spec)
            for group, spec in zip(config["groups"], specs, strict=True)
        ],
    )
    transfer = [int(group) for group in projection.transfer_group_ids]
    store = [int(group) for group in projection.store_group_ids]
    assert transfer == list(theirs.transfer_group_ids)
    assert store == list(theirs.prefix_cacheable_group_ids)
    for group, spec in zip(projection.groups(), specs, strict=True):
        layers = getattr(spec, "kv_cache_specs", {})
        pages = [layers.get(name, spec).page_size_bytes for name in group.layers]
        assert group.layer_page_bytes == pages
        contents = [
            getattr(each, "real_page_size_bytes", each.page_size_bytes)
            for each in (layers.get(name, spec) for name in group.layers)
        ]
        assert group.object_bytes == sum(contents)
        assert group.replay_tokens == getattr(spec, "prefix_replay_tokens", 0)
        assert group.tokens_per_block == spec.block_size
    engine: Any = SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=max(spec.block_size for spec in specs),
            enable_prefix_caching=True,
            prefix_match_unit=None,
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        kv_transfer_config=object(),
    )
    sizes = projection.scheduler_block_size, projection.hash_block_size
    assert sizes == resolve_kv_cache_block_sizes(theirs, engine)


def layers_of(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each layer's keys, in the order of the model."""
    found = {
        layer: member
        for group in config["groups"]
        for member in group.get("members", [group])
        for layer in member["layers"]
    }
    in_file = {layer: at for at, layer in enumerate(found)}

    def place(layer: str) -> tuple[int, int]:
        return int(layer.split(".")[1]), in_file[layer]

    return {layer: found[layer] for layer in sorted(found, key=place)}


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.stem)
def test_groups_are_those_that_the_engine_makes(path: Path) -> None:
    """Of the layers alone: which of them share a group, and their pages."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    try:
        from vllm.v1.core import kv_cache_planning as planning  # since 0.33
    except ImportError:
        from vllm.v1.core import kv_cache_utils as planning

    config = json.loads(path.read_text("utf-8"))
    layers = layers_of(config)
    engine = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[config["kv_layout"]],
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="any")),
    )
    specs = {layer: spec_of(fields) for layer, fields in layers.items()}
    theirs = {}
    for group in planning.get_kv_cache_groups(engine, specs):
        inside = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        theirs[frozenset(group.layer_names)] = {
            layer: inside.get(layer, group.kv_cache_spec).page_size_bytes
            for layer in group.layer_names
        }
    projection = kvprism.Projection(kvprism.CacheConfig.from_dict(config))
    ours = {
        frozenset(group.layers): dict(zip(group.layers, group.layer_page_bytes, strict=True))
        for group in projection.groups()
    }
    assert ours == theirs
