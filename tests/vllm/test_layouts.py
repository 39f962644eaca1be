"""Segments against vLLM's own views of its caches, for every layout that vLLM names."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import kvprism
import pytest
from kvprism.vllm.cache_config import segment_map

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
BLOCKS, POSITIONS, HEADS, HEAD = 5, 8, 2, 3


def engine(layout: str, specs: dict[str, Any]) -> tuple[Any, Any]:
    """vLLM's KVCacheConfig for the layers, and an allocation of its size, each byte a number."""
    import torch
    from vllm.v1.kv_cache_layout import KVCacheLayout

    try:
        from vllm.v1.core import kv_cache_planning as planning  # since 0.33
    except ImportError:
        from vllm.v1.core import kv_cache_utils as planning

    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="any")),
    )
    groups = planning.get_kv_cache_groups(config, specs)
    made = planning.get_kv_cache_config_from_groups(config, groups, 1 << 30)
    raw = torch.randint(0, 256, (made.kv_cache_tensors[0].size,), dtype=torch.uint8)
    return made, raw.view(torch.int8)


def views(layout: str, made: Any, raw: Any, kernel: int | None) -> dict[str, Any]:
    """Each layer as vLLM hands it to attention: block, head, position and content."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs, create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    spec_of = {}
    for group in made.kv_cache_groups:
        spec = group.kv_cache_spec
        for name in group.layer_names:
            wrapped = isinstance(spec, UniformTypeKVCacheSpecs)
            spec_of[name] = spec.kv_cache_specs[name] if wrapped else spec
    found = {}
    for placed in made.kv_cache_tensors:
        spec = spec_of[placed.layers[0]]
        split = kernel if hasattr(spec, "num_kv_heads") else None
        made_views = create_kv_cache_views(
            raw, spec, made.num_blocks, KVCacheLayout[layout], placed, split
        )
        found.update(zip(placed.layers, made_views, strict=True))
    return found


def contents(made: Any, seen: dict[str, Any]) -> dict[str, Any]:
    """Bytes of each layer by block, head, position and content."""
    import torch

    found = {}
    for name, view in seen.items():
        # Block, kernel block, head, position, content: kernel blocks continue positions.
        blocks = view.unflatten(0, (made.num_blocks, -1))
        parts = [torch.cat(list(block), dim=1).contiguous().view(torch.uint8) for block in blocks]
        found[name] = torch.stack(parts)
    return found


def described(made: Any, layout: str, groups: list[dict[str, Any]]) -> kvprism.Projection:
    config = {"num_blocks": made.num_blocks, "kv_layout": layout, "groups": groups}
    return kvprism.Projection(kvprism.CacheConfig.from_dict(config))


def object_of(segments: kvprism.SegmentMap, raw: Any, group: int, block: int) -> bytes:
    base = raw.data_ptr()
    return b"".join(
        raw[address - base : address - base + length].numpy().tobytes()
        for address, length in segments.segments(kvprism.GroupId(group), block)
    )


def expected(layout: str, layers: list[Any], block: int) -> bytes:
    """The block of all layers, in the order of the layout's letters without B."""
    import torch

    axes = ["LHNC".index(letter) for letter in layout.replace("B", "")]
    return torch.stack([layer[block] for layer in layers]).permute(axes).numpy().tobytes()


# vLLM splits only pages that lie together, and with blocks outermost only a whole block.
SPLIT = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")


@pytest.mark.parametrize(
    ("layout", "kernel"), [(name, None) for name in LAYOUTS] + [(name, 4) for name in SPLIT]
)
def test_one_group_of_attention(layout: str, kernel: int | None) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    layers = ["0"] if kernel and layout.startswith("B") else ["0", "1", "2"]
    spec = FullAttentionSpec(
        block_size=POSITIONS, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float16
    )
    made, raw = engine(layout, dict.fromkeys(layers, spec))
    group = {
        "kind": "full_attention",
        "layers": layers,
        "block_size": POSITIONS,
        "num_kv_heads": HEADS,
        "head_size": HEAD,
        "dtype": "float16",
    }
    caches = views(layout, made, raw, kernel)
    segments = segment_map(described(made, layout, [group]), made, caches)
    seen = contents(made, caches)
    for block in range(1, made.num_blocks):
        found = object_of(segments, raw, 0, block)
        assert found == expected(layout, [seen[name] for name in layers], block)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_over_one_pool(layout: str) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    sizes: dict[str, Any] = {
        "block_size": POSITIONS,
        "num_kv_heads": HEADS,
        "head_size": HEAD,
        "dtype": torch.float16,
    }
    full = FullAttentionSpec(**sizes)
    window = SlidingWindowSpec(**sizes, sliding_window=20)
    state = MambaSpec(
        block_size=POSITIONS,
        shapes=((7,), (3, 2)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=full.page_size_bytes,
        mamba_cache_mode="align",
    )
    specs: dict[str, Any] = {"f0": full, "f1": full, "w0": window, "w1": window, "m0": state}
    specs["m1"] = state
    made, raw = engine(layout, specs)
    attention = {
        "block_size": POSITIONS,
        "num_kv_heads": HEADS,
        "head_size": HEAD,
        "dtype": "float16",
    }
    kinds: dict[str, dict[str, Any]] = {
        "f": {"kind": "full_attention"} | attention,
        "w": {"kind": "sliding_window", "sliding_window": 20} | attention,
        "m": {
            "kind": "mamba",
            "block_size": POSITIONS,
            "mamba_cache_mode": "align",
            "shapes": [[7], [3, 2]],
            "dtypes": ["float32", "float32"],
            "page_size_padded": full.page_size_bytes,
        },
    }
    groups = [
        kinds[group.layer_names[0][0]] | {"layers": list(group.layer_names)}
        for group in made.kv_cache_groups
    ]
    projection = described(made, layout, groups)
    assert [int(g) for g in projection.store_group_ids] == list(made.prefix_cacheable_group_ids)
    caches = views(layout, made, raw, None)
    if layout == "LHBNC":
        # Heads apart and whole states in the same bytes: a state's page is several blocks' heads.
        with pytest.raises(kvprism.ConfigError, match="blocks that share no byte"):
            segment_map(projection, made, caches)
        return
    segments = segment_map(projection, made, caches)
    seen = contents(made, caches)
    for index, group in enumerate(groups):
        layers = [seen[name] for name in group["layers"]]
        for block in range(1, made.num_blocks):
            found = object_of(segments, raw, index, block)
            if group["kind"] == "mamba":
                # Without the padding of the page.
                assert len(found) == 2 * 4 * 13
                assert found == b"".join(layer[block].numpy().tobytes() for layer in layers)
            else:
                assert found == expected(layout, layers, block)


def test_pages_of_two_sizes_in_a_wrapper() -> None:
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    main = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=12, dtype=torch.uint8)
    index = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=5, dtype=torch.uint8)
    names = [f"{layer}.{part}" for layer in range(3) for part in ("attn", "index")]
    made, raw = engine("BLNHC", {name: main if "attn" in name else index for name in names})
    (group,) = made.kv_cache_groups
    members = [
        {
            "kind": "mla_attention",
            "block_size": 64,
            "num_kv_heads": 1,
            "head_size": size,
            "dtype": "uint8",
            "layers": [name for name in names if part in name],
        }
        for part, size in (("attn", 12), ("index", 5))
    ]
    wrapper = {"kind": "uniform", "layers": list(group.layer_names), "members": members}
    caches = views("BLNHC", made, raw, None)
    segments = segment_map(described(made, "BLNHC", [wrapper]), made, caches)
    seen = contents(made, caches)
    for block in range(1, made.num_blocks):
        wanted = b"".join(
            seen[name][block].transpose(0, 1).contiguous().numpy().tobytes()
            for name in group.layer_names
        )
        assert object_of(segments, raw, 0, block) == wanted


def test_a_page_that_is_laid_out_by_the_kernel_s_block_is_not_split() -> None:
    """NVFP4: data and scales of each kernel block lie apart (flashinfer.py)."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    spec = FullAttentionSpec(
        block_size=POSITIONS, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float16
    )
    made, raw = engine("LBHNC", {"0": spec})
    group = {
        "kind": "full_attention",
        "layers": ["0"],
        "block_size": POSITIONS,
        "num_kv_heads": HEADS,
        "head_size": HEAD,
        "dtype": "float16",
    }
    projection = described(made, "LBHNC", [group])
    whole, split = (views("LBHNC", made, raw, kernel) for kernel in (None, 4))
    segment_map(projection, made, split)
    packed = dataclasses.replace(spec, kv_quant_mode=KVQuantMode.NVFP4)
    made.kv_cache_groups[0].kv_cache_spec = packed
    segment_map(projection, made, whole)
    with pytest.raises(kvprism.ConfigError) as caught:
        segment_map(projection, made, split)
    assert "kv_cache_tensors[0].kernel_block_size = 4: expected whole blocks" in str(caught.value)


@pytest.mark.parametrize("kernel", [None, 4])
def test_a_view_of_another_pitch_is_named(kernel: int | None) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(
        block_size=POSITIONS, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float16
    )
    made, raw = engine("LBHNC", {"0": spec})
    group = {
        "kind": "full_attention",
        "layers": ["0"],
        "block_size": POSITIONS,
        "num_kv_heads": HEADS,
        "head_size": HEAD,
        "dtype": "float16",
    }
    projection = described(made, "LBHNC", [group])
    caches = views("LBHNC", made, raw, kernel)
    view = caches["0"]
    segment_map(projection, made, caches)
    pitch = spec.page_size_bytes // (POSITIONS // (kernel or POSITIONS))
    item = view.element_size()
    caches["0"] = view.as_strided(view.shape, (view.stride(0) - HEAD, *view.stride()[1:]))
    with pytest.raises(kvprism.ConfigError) as caught:
        segment_map(projection, made, caches)
    assert (
        f"kv_caches[0].stride(0) = '{pitch - HEAD * item} bytes': expected {pitch} bytes, "
        "block_stride over kernel blocks"
    ) in str(caught.value)
