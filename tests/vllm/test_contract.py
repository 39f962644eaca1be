"""vLLM's own classes against what the connector makes of them; no engine runs."""

from __future__ import annotations

import pickle
from fractions import Fraction
from typing import Any

import conftest
import kvprism
import numpy as np
import pytest
from kvprism import vllm as kvprism_vllm
from kvprism.vllm import cache_config

BLOCKS = 64


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(conftest.model("llama")), enforce_eager=True, block_size=32
    ).create_engine_config()


class _Interface:
    """vLLM's spec classes, without the arguments that an older version does not have yet."""

    def __getattr__(self, name: str) -> Any:
        import dataclasses

        from vllm.v1 import kv_cache_interface

        cls = getattr(kv_cache_interface, name)
        known = {field.name for field in dataclasses.fields(cls)}
        return lambda **given: cls(**{k: v for k, v in given.items() if k in known})


def specs() -> dict[str, Any]:
    import torch

    interface = _Interface()

    attention: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    latent: dict[str, Any] = {"num_kv_heads": 1, "head_size": 96, "dtype": torch.bfloat16}
    return {
        "full": interface.FullAttentionSpec(block_size=32, **attention),
        "window": interface.SlidingWindowSpec(
            block_size=32, sliding_window=100, extra_retained_tokens=3, **attention
        ),
        "ring": interface.CircularBufferSpec(
            block_size=8, num_kv_heads=1, head_size=128, head_size_v=0, dtype=torch.float32
        ),
        "mamba": interface.MambaSpec(
            block_size=32,
            shapes=((4, 32), (3, 8)),
            dtypes=(torch.float32, torch.bfloat16),
            mamba_cache_mode="align",
            page_size_padded=1024,
        ),
        "chunked": interface.ChunkedLocalAttentionSpec(
            block_size=32, attention_chunk_size=64, **attention
        ),
        "mla": interface.MLAAttentionSpec(block_size=32, cache_dtype_str="fp8_ds_mla", **latent),
        "compressed": interface.MLAAttentionSpec(block_size=32, tokens_per_state=4, **latent),
        "several": interface.FullAttentionSpec(
            block_size=32, tokens_per_state=Fraction(1, 2), **attention
        ),
        "hidden": interface.HiddenStateCacheSpec(block_size=32, **latent),
        "rswa": interface.RSWASpec(block_size=32, rswa_window=64, **attention),
        "sink": interface.SinkFullAttentionSpec(block_size=32, sink_len=32, **attention),
        "window_mla": interface.SlidingWindowMLASpec(
            block_size=32, sliding_window=64, alignment=512, **latent
        ),
        "replayed": interface.SlidingWindowMLASpec(
            block_size=32, sliding_window=64, bounded_replay=True, **latent
        ),
        "packed": interface.FullAttentionSpec(
            block_size=32, num_head_slots=3, state_content_bytes=300, **attention
        ),
        "cross": interface.CrossAttentionSpec(block_size=32, **attention),
        "encoder": interface.EncoderOnlyAttentionSpec(block_size=32, **attention),
        "hot": interface.HiSparseHotSpec(block_size=32, page_size=4096, blocks_per_request=4),
        "resident": interface.HiSparseResidentSpec(block_size=32, page_size=4096),
    }


def config(*names: str, **groups: Any) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    every = specs()
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(layer_names=[f"{name}.0", f"{name}.1"], kv_cache_spec=spec)
            for name, spec in [(name, every[name]) for name in names] + list(groups.items())
        ],
        kv_cache_layout="LBHNC",
    )


def test_groups_mean_the_same_on_both_sides(vllm_config: Any) -> None:
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    ours = config("full", "ring", "mamba", "window")
    sizes = resolve_kv_cache_block_sizes(ours, vllm_config)
    projection = cache_config.describe(vllm_config, ours, sizes, "tenant").projection
    assert (projection.scheduler_block_size, projection.hash_block_size) == sizes == (32, 32)
    assert projection.namespace == "tenant"
    stored = [
        gid
        for gid in range(projection.num_groups)
        if projection.store_index(kvprism.GroupId(gid)) is not None
    ]
    assert stored == list(ours.prefix_cacheable_group_ids) == [0, 2, 3]
    assert projection.num_transfer_groups == len(ours.transfer_group_ids) == 4
    for row, group in zip(projection.groups(), ours.kv_cache_groups, strict=True):
        assert row.page_size_bytes == group.kv_cache_spec.page_size_bytes
        assert row.tokens_per_block == group.kv_cache_spec.block_size


def test_a_ring_makes_the_steps_of_vllm_coarser(vllm_config: Any) -> None:
    """Said under the limits of docs/vllm.md (W-C17)."""
    import dataclasses

    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    ring = dataclasses.replace(specs()["ring"], block_size=24)
    ours = config("full", ring=ring)
    sizes = resolve_kv_cache_block_sizes(ours, vllm_config)
    assert sizes[0] == 96
    projection = cache_config.describe(vllm_config, ours, sizes, "").projection
    assert projection.scheduler_block_size == projection.hit_alignment == 96
    rows = [cache_config._group(group) for group in ours.kv_cache_groups]
    alone = kvprism.CacheConfig.from_dict({"num_blocks": BLOCKS, "groups": rows})
    assert kvprism.Projection(alone).scheduler_block_size == 32


@pytest.mark.parametrize(
    "name",
    [
        "full",
        "window",
        "ring",
        "mamba",
        "chunked",
        "mla",
        "compressed",
        "several",
        "hidden",
        "rswa",
        "sink",
        "window_mla",
        "replayed",
        "packed",
        "cross",
        "encoder",
        "hot",
        "resident",
    ],
)
def test_every_class_of_vllm(vllm_config: Any, name: str) -> None:
    """Beside full attention, since a model with nothing to store is refused."""
    ours = config("full", "mamba", more=specs()[name])
    projection = cache_config.describe(vllm_config, ours, (32, 32), "").projection
    row = projection.groups()[2]
    spec = specs()[name]
    assert row.page_size_bytes == spec.page_size_bytes
    assert row.tokens_per_block == spec.block_size
    stored = projection.store_index(kvprism.GroupId(2)) is not None
    if name in ("cross", "encoder"):
        # vLLM says so of them, and no store can hold them (D18).
        assert spec.prefix_cacheable
        assert not stored
    else:
        assert stored == spec.prefix_cacheable
    refused = [problem.path for problem in kvprism.validate_store(projection)]
    assert refused == (["groups[2].kind"] if name == "cross" else [])
    assert projection.replay_tokens == 1  # vLLM goes back behind a hit by itself


def test_a_wrapper_of_alike_layers_is_its_layer(vllm_config: Any) -> None:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    full = specs()["full"]
    wrapped = UniformTypeKVCacheSpecs(
        block_size=32, kv_cache_specs={"full.0": full, "full.1": full}
    )
    plain = cache_config.describe(vllm_config, config("full"), (32, 32), "")
    other = cache_config.describe(vllm_config, config(full=wrapped), (32, 32), "")
    assert other.projection.digest == plain.projection.digest
    assert other.schema.fingerprint == plain.schema.fingerprint
    wrapped.kv_cache_specs["full.1"] = full.copy_with_new_block_size(64)
    with pytest.raises(kvprism.ConfigError, match="tokens"):
        cache_config.describe(vllm_config, config(full=wrapped), (32, 32), "")


def test_a_wrapper_means_to_a_worker_what_its_first_layer_means_to_the_scheduler(
    vllm_config: Any,
) -> None:
    import dataclasses

    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    full = specs()["full"]
    wider = dataclasses.replace(full, num_kv_heads=4)
    wrapped = UniformTypeKVCacheSpecs(
        block_size=32, kv_cache_specs={"full.0": full, "full.1": wider}
    )
    worker = cache_config.describe(vllm_config, config(full=wrapped), (32, 32), "")
    scheduler = cache_config.describe(vllm_config, config("full"), (32, 32), "")
    assert worker.projection.digest == scheduler.projection.digest
    assert worker.schema.fingerprint == scheduler.schema.fingerprint
    # And its objects hold every layer's own page.
    pages = [full.page_size_bytes, wider.page_size_bytes]
    memories = [np.zeros(BLOCKS * page, np.uint8) for page in pages]
    places = kvprism.SegmentMap(
        worker.projection,
        [
            kvprism.CacheTensor(memory, layers=[f"full.{at}"], block_stride=pages[at])
            for at, memory in enumerate(memories)
        ],
    )
    one = kvprism.StoreWorker(worker.schema, places, kvprism.memory_store())
    assert one.close() == 0
    assert [length for _, length in places.segments(kvprism.GroupId(0), 1)] == pages


def test_a_wrapper_whose_layers_are_spread_otherwise_than_the_first_is_refused(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tensor ranks hold one latent vector alike, and other heads of full attention."""
    import copy
    import dataclasses
    from types import SimpleNamespace

    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    changed = copy.copy(vllm_config)
    changed.parallel_config = copy.copy(vllm_config.parallel_config)
    object.__setattr__(changed.parallel_config, "tensor_parallel_size", 2)
    latent, full = specs()["mla"], specs()["full"]
    wider = dataclasses.replace(latent, head_size=128)
    for second in (wider, full):
        wrapped = UniformTypeKVCacheSpecs(
            block_size=32, kv_cache_specs={"full.0": latent, "full.1": second}
        )
        groups = config(full=wrapped)
        if second is wider:
            schema = cache_config.describe(changed, groups, (32, 32), "").schema
            assert len(schema.shards(kvprism.StoreIndex(0))) == 1
            continue
        with pytest.raises(kvprism.ConfigError) as caught:
            cache_config.describe(changed, groups, (32, 32), "")
        assert "1 shards of its first layer, 2 of all its layers" in str(caught.value)
        # Where a draft model may have brought such layers, no ranks share keys.
        drafting = copy.copy(changed)
        draft = copy.copy(changed.model_config)
        monkeypatch.setattr(type(draft), "use_mla", property(lambda own, draft=draft: own is draft))
        object.__setattr__(
            drafting, "speculative_config", SimpleNamespace(draft_model_config=draft)
        )
        for row in (groups, config(full=latent)):
            schema = cache_config.describe(drafting, row, (32, 32), "").schema
            assert len(schema.shards(kvprism.StoreIndex(0))) == 2


def test_every_unknown_class_is_named(vllm_config: Any) -> None:
    class MineSpec(type(specs()["full"])):  # type: ignore[misc]
        pass

    mine = MineSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=specs()["full"].dtype)
    with pytest.raises(kvprism.ConfigError) as caught:
        cache_config.describe(vllm_config, config("full", mine=mine, more=mine), (32, 32), "")
    text = str(caught.value)
    assert "kv_cache_groups[1].kv_cache_spec = 'MineSpec': expected one of" in text
    assert "kv_cache_groups[2].kv_cache_spec = 'MineSpec'" in text
    assert "kvprism.vllm.register_spec()" in text

    kvprism_vllm.register_spec(
        "MineSpec",
        lambda spec: {
            "kind": "mine",
            "block_size": spec.block_size,
            "num_kv_heads": spec.num_kv_heads,
            "head_size": spec.head_size,
            "dtype": "bfloat16",
        },
        name="mine",
        payload="attention",
        dcp_sharded=True,
        latent=False,
        prefix_cacheable=True,
        hit="prefix",
        window=0,
        save="positional",
        peer="suffix",
        replay_tokens=0,
        fine_grained_lookup=True,
    )
    described = cache_config.describe(vllm_config, config("full", mine=mine), (32, 32), "")
    assert described.projection.groups()[1].kind == "mine"


def test_how_pages_of_one_size_are_packed_changes_the_keys(vllm_config: Any) -> None:
    import dataclasses

    from vllm.v1.kv_cache_interface import KVQuantMode

    modes = (KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.FP8_PER_TOKEN_HEAD)
    packed = [dataclasses.replace(specs()["full"], kv_quant_mode=mode) for mode in modes]
    assert len({spec.page_size_bytes for spec in packed}) == 1
    keys = {
        cache_config.describe(vllm_config, config(group=spec), (32, 32), "").schema.fingerprint
        for spec in packed
    }
    assert len(keys) == 2


def test_what_changes_the_bytes_changes_the_keys(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that key_facts() reads, one at a time (R35)."""
    import copy
    from types import SimpleNamespace

    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)

    def fingerprint(change: Any) -> str:
        changed = copy.copy(vllm_config)
        changed.model_config = copy.copy(vllm_config.model_config)
        changed.cache_config = copy.copy(vllm_config.cache_config)
        changed.attention_config = copy.copy(vllm_config.attention_config)
        changed.parallel_config = copy.copy(vllm_config.parallel_config)
        change(changed)
        described = cache_config.describe(changed, config("full"), (32, 32), "")
        return str(described.schema.fingerprint)

    def set_on(part: str, name: str, value: Any) -> Any:
        return lambda changed: object.__setattr__(getattr(changed, part), name, value)

    def config_with(changes: dict[str, Any]) -> Any:
        before = vllm_config.model_config.hf_config.to_dict()
        return set_on(
            "model_config", "hf_config", SimpleNamespace(to_dict=lambda: before | changes)
        )

    def draft(model: str, revision: str | None) -> Any:
        speculative = SimpleNamespace(
            draft_model_config=SimpleNamespace(model=model, revision=revision),
            use_eagle_block_drop=lambda: False,
        )
        return lambda changed: object.__setattr__(changed, "speculative_config", speculative)

    changes: list[Any] = [
        lambda changed: None,
        set_on("model_config", "model", "/another/model"),
        set_on("model_config", "revision", "v2"),
        set_on("model_config", "quantization", "fp8"),
        set_on("model_config", "dtype", "torch.float16"),
        config_with({"rope_theta": 12345.0}),
        config_with({"layer_types": ["full_attention"]}),
        set_on("cache_config", "cache_dtype", "fp8"),
        set_on("cache_config", "prefix_caching_hash_algo", "sha256_cbor"),
        set_on("attention_config", "backend", "FLASH_ATTN"),
        set_on("cache_config", "kv_cache_dtype_skip_layers", ["1"]),
        draft("/a/draft", None),
        draft("/a/draft", "v2"),
        draft("/another/draft", None),
    ]
    seen = [fingerprint(change) for change in changes]
    assert fingerprint(config_with({"_name_or_path": "/elsewhere"})) == seen[0]
    # Which layers each of two stages holds.
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    splits = (f"{layers - 1},1", f"0,{layers}")
    for split in splits:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", split)
        seen.append(fingerprint(set_on("parallel_config", "pipeline_parallel_size", 2)))
    assert len(set(seen)) == len(changes) + len(splits)


def test_which_tokens_a_context_rank_holds_changes_the_keys(vllm_config: Any) -> None:
    import copy
    import inspect

    from vllm.config import KVTransferConfig

    groups = config("full")

    def changed(beside: str | None = None, **sizes: int) -> Any:
        made = copy.copy(vllm_config)
        made.parallel_config = copy.copy(vllm_config.parallel_config)
        for name, value in sizes.items():
            object.__setattr__(made.parallel_config, name, value)
        if beside:
            connectors = [{"kv_connector": "KVPrismConnector"}, {"kv_connector": beside}]
            made.kv_transfer_config = KVTransferConfig(
                kv_connector="MultiConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"connectors": connectors},
            )
        return made

    def fingerprint(made: Any) -> str:
        return str(cache_config.describe(made, groups, (32, 32), "").schema.fingerprint)

    old, new = "dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size"
    assert fingerprint(changed(**{new: 8})) == fingerprint(changed()), "one rank holds all"
    spread = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    of = {size: fingerprint(changed(**spread, **{new: size})) for size in (1, 8, 16, 32)}
    assert len(set(of.values())) == 4
    assert fingerprint(changed(**spread)) == of[1]
    assert fingerprint(changed(**spread, **{old: 8})) == of[8]
    assert fingerprint(changed(**spread, **{old: 8, new: 16})) == of[8]
    beside = changed("NixlConnector", **spread)
    assert fingerprint(beside) == of[32], "which the engine makes block by block"
    told = {"_allow_auto_resolve_cp_interleave_size": False, new: 8}
    assert fingerprint(changed("NixlConnector", **spread, **told)) == of[8]
    # A worker's own settlement, which the scheduler has not seen before 0.33.
    for given in ({old: 8}, {old: 8, new: 16}, {new: 16}, told):
        for other in (None, "NixlConnector", "OffloadingConnector"):
            settled = changed(other, **spread, **given)
            before = fingerprint(settled)
            settle = settled.adjust_dcp_kv_cache_interleave_size
            whole = "kv_cache_config" in inspect.signature(settle).parameters
            settle(groups if whole else groups.kv_cache_groups)
            assert fingerprint(settled) == before, (given, other)


def test_hashes_of_another_generation_have_other_names(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions before 0.31 hash adapters, media and salts otherwise."""
    from vllm.v1.core import kv_cache_utils

    ours = cache_config.key_facts(vllm_config)["model_revision"]
    if hasattr(kv_cache_utils, "to_event_extra_keys"):
        monkeypatch.delattr(kv_cache_utils, "to_event_extra_keys")
    else:
        monkeypatch.setattr(kv_cache_utils, "to_event_extra_keys", None, raising=False)
    assert cache_config.key_facts(vllm_config)["model_revision"] != ours


def test_where_a_window_is_computed_anew_hits_end_on_whole_blocks(vllm_config: Any) -> None:
    """vLLM cuts an offer to them there, and would refuse what it has cut."""
    import dataclasses

    replayed = specs()["replayed"]
    if not hasattr(replayed, "bounded_replay"):
        pytest.skip("since 0.31")
    for names, aligned in ((("full", "mamba"), 32), (("full", "mamba", "replayed"), 64)):
        ours = config(*names)
        for group in ours.kv_cache_groups:
            spec = dataclasses.replace(group.kv_cache_spec, block_size=64)
            object.__setattr__(group, "kv_cache_spec", spec)
        object.__setattr__(ours, "cache_hit_alignment_tokens", 32)
        projection = cache_config.describe(vllm_config, ours, (64, 32), "").projection
        assert projection.hit_alignment == aligned
        # The window is 64 tokens: vLLM computes them again of the hit's own, not of what follows.
        assert projection.max_hit(200) == 192
        assert projection.max_hit(65) == 64


# Groups and the tokens of their blocks, context ranks, and where hits end with hashes of 32 tokens.
ENDS: list[tuple[dict[str, int], int, int]] = [
    ({"full": 64, "mamba": 64}, 1, 32),
    ({"full": 64, "mamba": 64}, 2, 32),
    ({"full": 32, "mamba": 64}, 1, 32),
    ({"full": 64, "mamba": 32}, 1, 64),
    ({"full": 32, "mamba": 32}, 2, 32),
    ({"full": 64, "mamba": 64, "ring": 32}, 1, 32),
    ({"full": 64, "mamba": 64, "ring": 64}, 1, 64),  # less is taken than vLLM offers (D30)
    ({"full": 64, "mamba": 64, "window": 32}, 1, 32),
    ({"full": 64, "mamba": 64, "window": 64}, 1, 64),
    ({"full": 64, "mamba": 64, "chunked": 64}, 1, 64),
    ({"full": 64, "window": 32}, 1, 64),
]


@pytest.mark.parametrize(("sizes", "ranks", "expected"), ENDS)
def test_hits_end_where_those_of_vllm_do(
    vllm_config: Any, sizes: dict[str, int], ranks: int, expected: int
) -> None:
    """Versions before 0.32 do not say where."""
    import copy
    import dataclasses

    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    ours = config(*sizes)
    for group, size in zip(ours.kv_cache_groups, sizes.values(), strict=True):
        spec = dataclasses.replace(group.kv_cache_spec, block_size=size)
        object.__setattr__(group, "kv_cache_spec", spec)
    step = 64 * ranks if 64 in sizes.values() else 64
    manager = KVCacheManager(ours, 1024, step, 32, dcp_world_size=ranks)
    theirs = manager.coordinator._cache_hit_alignment_tokens
    fine = cache_config._ends_inside_blocks(ours.kv_cache_groups, 32, ranks)
    assert theirs == (32 if fine else step)
    # A worker has wrappers where the scheduler has their first layer.
    wrapped = config(*sizes)
    for group, plain in zip(wrapped.kv_cache_groups, ours.kv_cache_groups, strict=True):
        layers = dict.fromkeys(group.layer_names, plain.kv_cache_spec)
        spec = UniformTypeKVCacheSpecs(
            block_size=plain.kv_cache_spec.block_size, kv_cache_specs=layers
        )
        object.__setattr__(group, "kv_cache_spec", spec)
    assert cache_config._ends_inside_blocks(wrapped.kv_cache_groups, 32, ranks) == fine
    resolve = getattr(kv_cache_utils, "resolve_cache_hit_alignment_tokens", None)
    if resolve is not None:
        changed = copy.copy(vllm_config)
        changed.parallel_config = copy.copy(vllm_config.parallel_config)
        object.__setattr__(changed.parallel_config, "decode_context_parallel_size", ranks)
        assert resolve(ours, changed, step, 32) == theirs
        object.__setattr__(ours, "cache_hit_alignment_tokens", theirs)
    assert cache_config._hit_alignment(ours, (step, 32), ranks) == expected


def test_beside_a_ring_hits_end_where_it_is_empty(vllm_config: Any) -> None:
    """It is in no store: behind a hit that ends within it, its rows would be missing."""
    import dataclasses

    for capacity, aligned in ((32, 32), (64, 64), (8, 32)):
        ours = config("full", "mamba", "ring")
        *others, ring = ours.kv_cache_groups
        for group, size in (*((each, 64) for each in others), (ring, capacity)):
            spec = dataclasses.replace(group.kv_cache_spec, block_size=size)
            object.__setattr__(group, "kv_cache_spec", spec)
        object.__setattr__(ours, "cache_hit_alignment_tokens", 32)
        projection = cache_config.describe(vllm_config, ours, (64, 32), "").projection
        assert projection.hit_alignment == aligned, capacity
        assert projection.max_hit(200) % aligned == 0


def test_hashes_that_differ_between_processes_are_refused(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_config.cache_config, "prefix_caching_hash_algo", "xxhash")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(kvprism.ConfigError, match="hash"):
        cache_config.describe(vllm_config, config("full"), (32, 32), "")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    cache_config.describe(vllm_config, config("full"), (32, 32), "")


def test_this_vllm_speaks_the_contract() -> None:
    from kvprism.vllm import KVPrismConnector
    from kvprism.vllm.contract import differences
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    assert differences(KVPrismConnector, (KVConnectorBase_V1, SupportsHMA)) == []


def test_every_difference_of_another_vllm_is_named() -> None:
    from abc import abstractmethod

    from kvprism.vllm import KVPrismConnector
    from kvprism.vllm.contract import differences
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    class Changed(KVConnectorBase_V1):
        wait_for_save = None  # type: ignore[assignment]

        def get_num_new_matched_tokens(self, request: Any, computed: int, more: int) -> Any:
            raise NotImplementedError

        def register_finished_partial_tail(self, request: Any, offers: Any) -> Any:
            raise NotImplementedError

        @classmethod
        def build_prom_metrics(cls, config: Any) -> Any:
            raise NotImplementedError

        @abstractmethod
        def told_by_nobody(self) -> None: ...

    used = (
        ("vllm.v1.outputs", "KVConnectorOutput", ("gone", "finished_recving")),
        ("vllm.v1.request", "Request", ("kv_transfer_params", "gone")),
        ("vllm.v1.request", "Gone", ()),
    )
    called = (
        ("vllm.distributed.utils", "get_pp_indices", ("num_hidden_layers", "pp_rank", "stages")),
        ("vllm.distributed.utils", "get_gone", ("one", "other")),
        ("vllm.v1.request", "Request.__init__", ("request_id",)),
    )
    found = differences(KVPrismConnector, (Changed, SupportsHMA), used, called)
    constructor = [line for line in found if line.startswith("vllm.v1.request.Request.__init__(")]
    assert len(constructor) == 1
    assert constructor[0].endswith("): expected (request_id)")
    found.remove(constructor[0])
    assert sorted(found) == [
        "Changed.build_prom_metrics(config): "
        "expected (vllm_config, metric_types, labelnames, per_engine_labelvalues)",
        "Changed.get_num_new_matched_tokens(request, computed, more): "
        "expected (request, num_computed_tokens)",
        "Changed.register_finished_partial_tail(request, offers): "
        "expected (request, block_ids, partial_tail_offloads)",
        "Changed.told_by_nobody: must be defined, and is not known",
        "Changed.wait_for_save: missing, expected ()",
        "vllm.distributed.utils.get_gone: missing, expected (one, other)",
        "vllm.distributed.utils.get_pp_indices(num_hidden_layers, pp_rank, pp_size): "
        "expected (num_hidden_layers, pp_rank, stages)",
        "vllm.v1.outputs.KVConnectorOutput.gone: missing",
        "vllm.v1.request.Gone: missing",
        "vllm.v1.request.Request.gone: missing",
    ]


def test_an_import_that_is_gone_is_told_with_everything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked for before the connector is imported, which would end with the first one."""
    from kvprism.vllm import contract
    from vllm.distributed.kv_transfer import kv_transfer_state

    contract.check_imports()
    monkeypatch.delattr(kv_transfer_state, "has_kv_transfer_group")
    gone = (("vllm.v1.gone", "Gone", ("one",)),)
    monkeypatch.setattr(contract, "_USED", gone)
    for _ in range(2):
        with pytest.raises(kvprism.UnsupportedError) as caught:
            _ = kvprism_vllm.KVPrismConnector
    state = "vllm.distributed.kv_transfer.kv_transfer_state"
    assert str(caught.value).split(":\n  ")[1].split("\n  ") == [
        f"{state}.has_kv_transfer_group: missing",
        "vllm.v1.gone.Gone: missing",
        f"{state}.has_kv_transfer_group: missing, expected ()",
    ]


def test_every_import_of_our_modules_is_asked_for_before() -> None:
    import ast
    from pathlib import Path

    from kvprism.vllm import contract

    found: dict[str, set[str]] = {}
    for file in Path(contract.__file__).parent.glob("*.py"):
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                found.setdefault(str(node.module), set()).update(each.name for each in node.names)
    assert found == {module: set(names) for module, names in contract._IMPORTED}


# Read with a default for a reason, and not of a class that every version has so.
NOT_OF_THE_CONTRACT = {
    *("__abstractmethods__", "__code__", "__dataclass_fields__", "name", "value"),  # Python's
    *("to_dict", "eagle_aux_hidden_state_layer_ids"),  # of a model's own configuration
    "_is_amx_tile_supported",  # PyTorch's
    *("_update_request_as_session", "to_event_extra_keys"),  # functions: what lacks them has no use
    "prefix_replay_tokens",  # since 0.31
    "original_max_model_len",  # set by an instance, as it is fitted
}


def test_whatever_is_read_with_a_default_is_in_the_contract() -> None:
    """vLLM could take it away, and nobody would hear of it."""
    import ast
    from pathlib import Path

    from kvprism.vllm import contract

    rows = {name: set(members) for _, name, members in contract._USED}
    defaults: set[str] = set()
    # By what variables and fields are called, which says of these what they are.
    read: dict[str, set[str]] = {"parallel": set(), "parallel_config": set(), "request": set()}
    for file in Path(contract.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            match node:
                case ast.Call(ast.Name("getattr"), [_, ast.Constant(str(name)), _]):
                    defaults.add(name)
                case ast.Attribute(ast.Name(of) | ast.Attribute(_, of), name) if of in read:
                    read[of].add(name)
    assert defaults - NOT_OF_THE_CONTRACT - set().union(*rows.values()) == set()
    assert defaults >= NOT_OF_THE_CONTRACT, "and no longer than it is"
    sizes = {"pp"}  # of our own ParallelSizes
    assert (read["parallel"] | read["parallel_config"]) - sizes <= rows["ParallelConfig"]
    assert read["request"] <= rows["Request"]


def test_every_method_of_the_contract_is_our_own() -> None:
    """Newer versions call what older ones do not know: nothing is left to a default."""
    from kvprism.vllm import KVPrismConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    # Plain book-keeping of the base, and the split of hits by tier, which is not known here.
    left = {"role", "has_connector_metadata", "get_external_cache_hit_sources"}
    left |= {"get_loaded_kv_cache_group_ids"}  # the storable groups, by default
    public = {name for name in vars(KVConnectorBase_V1) if not name.startswith("_")}
    assert public - left <= set(vars(KVPrismConnector))
    assert {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"} <= set(
        vars(KVPrismConnector)
    )


def test_what_the_connector_says_of_itself() -> None:
    """The base class would say that saves must be delivered (W-C18) and that it can sleep (N3)."""
    from types import SimpleNamespace

    from kvprism.vllm import KVPrismConnector

    assert KVPrismConnector.supports_sleep_mode(None) is False
    connector = object.__new__(KVPrismConnector)
    assert connector.requires_kv_delivery is False
    assert connector.supports_divergent_local_hybrid_hits is False
    # With an allocator that can unmap, vLLM sleeps without sleep mode as well.
    connector._worker = None
    connector.unregister_kv_caches()
    connector._worker = SimpleNamespace(released=True)
    connector.unregister_kv_caches()
    connector._worker.released = False
    with pytest.raises(kvprism.ConfigError, match="= 'unmapped': expected memory that stays"):
        connector.unregister_kv_caches()


def test_what_the_connector_cannot_do_right_is_refused_at_once() -> None:
    from types import SimpleNamespace

    from kvprism.vllm.connector import _refuse_what_cannot_be_right as check

    parallel = SimpleNamespace(distributed_executor_backend="external_launcher", world_size=1)
    # Versions before 0.33 ask nobody whether a connector can sleep (N5).
    engine = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=False), parallel_config=parallel
    )
    check(engine)
    engine.model_config.enable_sleep_mode = True
    parallel.enable_fault_tolerance = True
    parallel.world_size = 2
    with pytest.raises(kvprism.ConfigError) as caught:
        check(engine)
    text = str(caught.value)
    assert "enable_sleep_mode = True: expected False" in text
    assert "enable_fault_tolerance = True: expected False" in text
    assert "distributed_executor_backend = 'external_launcher': expected an executor" in text
    assert "each of 2 schedulers" in text


def test_a_quantisation_is_known_by_its_name(vllm_config: Any) -> None:
    """Numbers of modes are shared between two of them in 0.33 (N4)."""
    import copy

    seen = set()
    for name in ("auto", "fp8_e4m3", "fp8_e5m2"):
        changed = copy.copy(vllm_config)
        changed.cache_config = copy.copy(vllm_config.cache_config)
        object.__setattr__(changed.cache_config, "cache_dtype", name)
        facts = cache_config.key_facts(changed)
        assert facts["kv_quantization"] == name
        seen.add(cache_config.describe(changed, config("full"), (32, 32), "").schema.fingerprint)
    assert len(seen) == 3


def test_metadata_travels_as_bytes() -> None:
    from kvprism.vllm.metadata import ReportMetadata, StepMetadata

    step = StepMetadata(b"plan", ((1, "a"),), ("b",), (3,))
    assert pickle.loads(pickle.dumps(step)) == step
    assert len(pickle.dumps(StepMetadata())) < 200
    one, other = ReportMetadata(b"one"), ReportMetadata(b"other")
    assert one.aggregate(other).reports == b"oneother"
    assert one.reports == b"one"
    with pytest.raises(TypeError):
        one.aggregate(object())  # type: ignore[arg-type]


def test_the_name_is_known_to_vllm_without_a_module_path() -> None:
    from kvprism.vllm import KVPrismConnector
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    assert KVConnectorFactory.get_connector_class_by_name("KVPrismConnector") is KVPrismConnector


class SetOnly:
    """A gauge as Ray's are."""

    shown: dict[tuple[str, ...], list[SetOnly]] = {}  # noqa: RUF012  # of all front ends

    def __init__(
        self, name: str, documentation: str, labelnames: list[str], multiprocess_mode: str
    ) -> None:
        assert multiprocess_mode == "sum"
        self.name, self.labelnames, self.value = name, labelnames, 0.0

    def labels(self, *values: object) -> SetOnly:
        assert len(values) == len(self.labelnames)
        child = SetOnly(self.name, "", self.labelnames, "sum")
        self.shown.setdefault((self.name, *map(str, values)), []).append(child)
        return child

    def set(self, value: float) -> None:
        self.value = value


def test_gauges_of_several_front_ends_add_up() -> None:
    """Each of two API servers hears of every other step; a gauge of Ray has nothing but set()."""
    from types import SimpleNamespace

    from kvprism.vllm.stats import GAUGES, Differences, StoreMetrics
    from prometheus_client import Counter, Gauge, Histogram

    kinds: dict[Any, Any] = {Gauge: SetOnly}
    kinds[Counter] = kinds[Histogram] = lambda **_: SimpleNamespace(labels=lambda *_: None)
    config = SimpleNamespace(kv_transfer_config=None)
    values: dict[int, list[object]] = {0: ["front0"], 1: ["front1"]}
    fronts = [StoreMetrics(config, kinds, ["engine"], values) for _ in range(2)]
    differences = Differences()
    for step, alive in enumerate((3, 7, 2, 0, 5)):
        told = differences.take({"ledger": {"alive": alive, "blocks_held": 10 * alive}})
        assert told is not None
        fronts[step % 2].observe(told.data, 1)
        for name, level in (("jobs_alive", alive), ("blocks_held", 10 * alive)):
            shown = SetOnly.shown[f"vllm:kvprism_{name}", "front1"]
            assert len(shown) == len(fronts)
            assert sum(gauge.value for gauge in shown) == level
    every = {f"vllm:kvprism_{name}" for name, _ in GAUGES.values()}
    assert {name for name, value in SetOnly.shown if value == "front0"} == every
    assert not any(SetOnly.shown[name, "front0"][at].value for name in every for at in range(2))


def test_what_a_worker_moves_is_told_by_group() -> None:
    from types import SimpleNamespace

    from kvprism.vllm.stats import GROUP_COUNTERS, Differences, StoreMetrics

    group = {name: 0 for name in GROUP_COUNTERS if "." not in name}
    groups: list[dict[str, Any]] = [dict(group), dict(group)]
    differences = Differences()
    assert differences.take_groups(groups) is None
    groups[1] |= {"stored_bytes": 512, "put_time": {"count": 1, "sum_us": 70}}
    told = differences.take_groups(groups)
    assert told is not None
    assert told.data == {
        "groups.1.stored_bytes": 512,
        "groups.1.put_time.count": 1,
        "groups.1.put_time.sum_us": 70,
    }
    assert differences.take_groups(groups) is None
    assert told.reduce() == {}, "the log's line has no groups"

    counted: dict[tuple[str, ...], float] = {}

    class Counter:
        """Like one of prometheus_client."""

        def __init__(self, name: str, documentation: str, labelnames: list[str]) -> None:
            self.name, self.labelnames, self.values = name, labelnames, ("",)

        def labels(self, *values: object) -> Counter:
            assert len(values) == len(self.labelnames)
            child = Counter(self.name, "", self.labelnames)
            child.values = tuple(map(str, values))
            return child

        def inc(self, added: float) -> None:
            key = (self.name, *self.values)
            counted[key] = counted.get(key, 0) + added

    from prometheus_client import Counter as Real
    from prometheus_client import Gauge, Histogram

    kinds = {Real: Counter, Gauge: SetOnly, Histogram: Counter}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = StoreMetrics(config, kinds, ["engine"], {0: ["e0"]})
    metrics.observe(told.data | {"loads": 2, "groups.1.unknown": 3})
    assert counted == {
        ("vllm:kvprism_group_stored_bytes", "e0", "1"): 512,
        ("vllm:kvprism_group_puts_timed", "e0", "1"): 1,
        ("vllm:kvprism_group_put_us", "e0", "1"): 70,
        ("vllm:kvprism_loads", "e0"): 2,
    }


def test_durations_and_gauges_are_those_of_the_core() -> None:
    from kvprism.vllm.stats import BOUNDS_US, COUNTERS, DURATIONS, GAUGES

    groups = [{"kind": "full_attention", "layers": ["a"], "block_size": 32, "num_kv_heads": 1}]
    groups[0] |= {"head_size": 8, "dtype": "float16"}
    cache = kvprism.CacheConfig.from_dict({"num_blocks": 8, "groups": groups})
    schema = kvprism.KeySchema.make(
        kvprism.Projection(cache), model="m", hash_algorithm="sha256", hash_is_stable=True
    )
    core = kvprism.StoreScheduler(schema, kvprism.memory_store())
    durations = core.durations()
    assert set(durations) == set(DURATIONS)
    for times in durations.values():
        bounds = [name for name in times if name.startswith("up_to_us_")]
        assert bounds == [f"up_to_us_{bound}" for bound in (*BOUNDS_US, "inf")]
    counters = core.counters()
    for path in COUNTERS | GAUGES:
        first, _, rest = path.partition(".")
        if first in ("index", "mode"):
            continue  # of the store, and a property
        value = counters[first]
        assert (value[rest] if isinstance(value, dict) else value) == 0, path
    core.close()


def test_what_took_how_long_is_counted_like_a_histogram() -> None:
    from types import SimpleNamespace

    from kvprism.vllm.stats import BOUNDS_US, Differences, StoreMetrics
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    times = {f"up_to_us_{bound}": 0 for bound in (*BOUNDS_US, "inf")}
    differences = Differences()
    ledger = {"alive": 2, "blocks_held": 40, "blocks_in_quarantine": 8}
    first = times | {"up_to_us_2000": 3, "up_to_us_inf": 1}
    told = differences.take({"ledger": ledger, "durations": {"load_time": first}})
    assert told is not None
    assert told.data == {
        "ledger.alive": 2,
        "ledger.blocks_held": 40,
        "ledger.blocks_in_quarantine": 8,
        "durations.load_time.up_to_us_2000": 3,
        "durations.load_time.up_to_us_inf": 1,
    }
    assert told.reduce() == {}, "the log's line has neither gauges nor buckets"
    kinds = {each: each for each in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = StoreMetrics(config, kinds, ["engine"], {0: ["durations"]})
    metrics.observe(told.data)
    less = differences.take({"ledger": ledger | {"alive": 1}, "durations": {"load_time": first}})
    assert less is not None
    assert less.data == {"ledger.alive": -1}
    metrics.observe(less.data)

    def value(name: str, **labels: str) -> float | None:
        labels |= {"engine": "durations"}
        return REGISTRY.get_sample_value(f"vllm:kvprism_{name}", labels)

    bucket = "load_seconds_bucket_total"
    assert value(bucket, le="0.001") is None
    assert value(bucket, le="0.002") == value(bucket, le="60.0") == 3
    assert value(bucket, le="+Inf") == 4
    assert value("jobs_alive") == 1
    assert value("blocks_held") == 40
    # Where the counters begin again, gauges go on.
    differences.begin_again()
    again = differences.take({"ledger": ledger | {"alive": 0}, "durations": {"load_time": times}})
    assert again is not None
    assert again.data == {"ledger.alive": -1}


def test_stats_add_up_in_any_order() -> None:
    from kvprism.vllm import KVPrismConnector
    from kvprism.vllm.stats import COUNTERS, Differences

    counters: dict[str, Any] = {name: 0 for name in COUNTERS if "." not in name}
    counters["ledger"] = {"quarantined": 0}
    differences = Differences()
    assert differences.take(counters) is None
    counters["loads"] = 2
    first = differences.take(counters)
    counters |= {"loads": 5, "ledger": {"quarantined": 1}}
    second = differences.take(counters)
    assert first is not None
    assert second is not None
    assert second.data == {"loads": 3, "ledger.quarantined": 1}
    sent = KVPrismConnector.build_kv_connector_stats(second.to_dict())
    both = sent.aggregate(first)
    assert both.reduce() == {"kvprism_loads": 5, "kvprism_ledger.quarantined": 1}
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()
