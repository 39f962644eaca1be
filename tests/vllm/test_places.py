"""What the connector makes of vLLM's tensors and of the model's configuration."""

from __future__ import annotations

from typing import Any

import conftest
import kvprism
import pytest
import test_layouts as layouts
from kvprism.vllm import cache_config

SHAPE = {
    "block_size": layouts.POSITIONS,
    "num_kv_heads": layouts.HEADS,
    "head_size": layouts.HEAD,
}


def cache(layout: str) -> tuple[Any, Any, kvprism.Projection]:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    layers = ["0", "1", "2"]
    spec = FullAttentionSpec(**SHAPE, dtype=torch.float16)
    made, raw = layouts.engine(layout, dict.fromkeys(layers, spec))
    group = {"kind": "full_attention", "layers": layers, "dtype": "float16", **SHAPE}
    return made, raw, layouts.described(made, layout, [group])


@pytest.mark.parametrize(("named", "given"), [("LBHNC", "LBNHC"), ("LBNHC", "LBHNC")])
def test_a_view_in_another_order_is_refused(named: str, given: str) -> None:
    made, raw, projection = cache(named)
    with pytest.raises(kvprism.Error) as caught:
        cache_config.segment_map(projection, made, layouts.views(given, made, raw, None))
    text = str(caught.value)
    for layer in ("0", "1", "2"):
        assert f"kv_caches[{layer}].stride()" in text
    assert f"expected heads and tokens in the order of layout {named}" in text


def facts(**arguments: Any) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs

    model = str(conftest.model("llama"))
    return cache_config.key_facts(
        EngineArgs(model=model, enforce_eager=True, **arguments).create_engine_config()
    )


def test_what_changes_the_values_changes_the_keys() -> None:
    plain = facts(dtype="float32")
    assert plain == facts(dtype="float32")
    others = [
        facts(dtype="bfloat16"),
        facts(dtype="float32", hf_overrides={"rope_theta": 500_000.0}),
        facts(dtype="float32", hf_overrides={"rms_norm_eps": 1e-6}),
    ]
    seen = {tuple(sorted(f.items())) for f in [plain, *others]}
    assert len(seen) == 4


def test_facts_are_the_same_in_every_process() -> None:
    class Odd:
        """Prints its address."""

    noted = cache_config._as_json({"a": Odd(), "b": (1, 2.5, None, True), "_name_or_path": "/x"})
    assert noted == {"a": "Odd", "b": [1, 2.5, None, True]}


def two_stages() -> tuple[Any, list[Any], Any]:
    """vLLM's configs of two pipeline stages, the first without windows, and the scheduler's."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    vllm_config = EngineArgs(
        model=str(conftest.model("llama")), enforce_eager=True, block_size=32, max_model_len=64
    ).create_engine_config()
    vllm_config.parallel_config.pipeline_parallel_size = 2
    vllm_config.cache_config.kv_cache_layout = "LBHNC"
    vllm_config.cache_config.num_gpu_blocks_override = 16
    shape = {"block_size": 32, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
    full = FullAttentionSpec(**shape)
    window = SlidingWindowSpec(**shape, sliding_window=40)
    specs = [
        {"0.attn": full},
        {"1.attn": full, "2.attn": window, "3.attn": window},
    ]
    stages = kv_cache_utils.get_kv_cache_configs(vllm_config, specs, [1 << 26, 1 << 26])
    return vllm_config, stages, kv_cache_utils.generate_scheduler_kv_cache_config(stages)


def test_a_stage_without_layers_of_a_group() -> None:
    import torch

    vllm_config, stages, whole = two_stages()
    sizes = (32, 32)
    held = [cache_config.held_groups(stage) for stage in stages]
    full, window = sorted(range(2), key=lambda gid: gid not in held[0])
    assert held == [(full,), tuple(sorted((full, window)))]
    workers = [cache_config.describe(vllm_config, stage, sizes, "places") for stage in stages]
    scheduler = cache_config.describe(
        vllm_config, whole, sizes, "places", stages=dict(enumerate(held))
    )
    for worker in workers:
        assert worker.projection.digest == scheduler.projection.digest
        assert worker.schema.fingerprint == scheduler.schema.fingerprint
    asked = {
        gid: [shard.pp for shard in scheduler.schema.shards(kvprism.StoreIndex(gid))]
        for gid in (full, window)
    }
    assert asked == {full: [0, 1], window: [1]}
    for stage, worker in zip(stages, workers, strict=True):
        memory = torch.zeros(stage.kv_cache_tensors[0].size, dtype=torch.int8)
        places = cache_config.segment_map(
            worker.projection, stage, layouts.views("LBHNC", stage, memory, None)
        )
        for gid, group in enumerate(stage.kv_cache_groups):
            found = len(places.segments(kvprism.GroupId(gid), 1))
            assert found == len(group.layer_names)


def test_stages_that_name_their_objects_otherwise_are_refused() -> None:
    vllm_config, _, whole = two_stages()
    scheduler = cache_config.describe(vllm_config, whole, (32, 32), "places")
    ours = scheduler.schema.fingerprint
    cache_config.check_stages(scheduler, {0: ours, 1: ours})
    with pytest.raises(kvprism.ConfigError) as caught:
        cache_config.check_stages(scheduler, {0: ours, 1: "0" * 32})
    assert f"pipeline stage 1: fingerprint of its keys = '{'0' * 32}': expected {ours}" in str(
        caught.value
    )


def test_workers_tell_the_scheduler_which_groups_they_hold() -> None:
    from kvprism.local_mooncake import LocalMooncake
    from kvprism.vllm import KVPrismConnector
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    vllm_config, stages, whole = two_stages()
    with LocalMooncake(storage_bytes=64 << 20) as mooncake:
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="KVPrismConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"master_server_address": mooncake.master},
        )
        half = KVPrismConnector(vllm_config, KVConnectorRole.SCHEDULER, whole)
        told = {
            (stage, 0): KVPrismConnector(
                vllm_config, KVConnectorRole.WORKER, config
            ).get_handshake_metadata()
            for stage, config in enumerate(stages)
        }
        hashes = [bytes([at]) * 32 for at in range(4)]
        for _ in range(2):  # since 0.33 it may come again
            half.set_xfer_handshake_metadata_pp_aware({**told, (0, 1): object()})
            half.set_xfer_handshake_metadata_pp_aware(told)
        core = half._half()._core
        assert core.lookup(1, 100, hashes) is None
        core.end_step()
        # Three blocks of attention on both stages, and of windows on one.
        assert core.counters()["lookup_keys"] == 3 * 2 + 3
        half.shutdown()
