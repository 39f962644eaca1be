"""What the connector makes of vLLM's tensors and of the model's configuration."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import conftest
import kvprism
import pytest
import test_halves as halves
import test_layouts as layouts
from kvprism.local_mooncake import LocalMooncake, open_local
from kvprism.vllm import cache_config, worker_side
from kvprism.vllm.metadata import StageMetadata, StepMetadata

pytestmark = pytest.mark.xdist_group("places")

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


def test_the_layers_of_each_stage_change_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of other layers may have objects of the same sizes."""
    vllm_config, _, whole = two_stages()
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    seen = set()
    for first in (1, layers):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", f"{first},{layers - first}")
        described = cache_config.describe(vllm_config, whole, (32, 32), "places")
        assert described.facts["pipeline_split"] == f"0-{first},{first}-{layers}"
        seen.add(described.schema.fingerprint)
    assert len(seen) == 2
    assert facts()["pipeline_split"] == ""


def two_stages(*, first_has_window: bool = False) -> tuple[Any, list[Any], Any]:
    """vLLM's configs of two pipeline stages and the scheduler's."""
    import planning
    import torch
    from vllm.engine.arg_utils import EngineArgs
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
    if first_has_window:
        specs = [{f"{at}.attn": full, f"{at}.window": window} for at in range(2)]
    stages = planning.of_workers(vllm_config, specs, memory=1 << 26)
    return vllm_config, stages, planning.of_scheduler(stages)


def one_stage() -> Any:
    vllm_config, _, _ = two_stages()
    vllm_config.parallel_config.pipeline_parallel_size = 1
    return vllm_config


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
    facts = scheduler.projection.digest_facts
    ours = scheduler.schema.fingerprint
    cache_config.check_ranks(scheduler, {(0, 0): (ours, facts), (1, 0): (ours, facts)})
    with pytest.raises(kvprism.ConfigError) as caught:
        cache_config.check_ranks(scheduler, {(0, 0): (ours, facts), (1, 0): ("0" * 32, facts)})
    assert str(caught.value) == (
        "what ranks see of the caches: 1 problem\n"
        f"  rank (1, 0): fingerprint of its keys = '{'0' * 32}': expected {ours} (layers of one "
        "group differ in size, and this stage begins with another one)"
    )


@pytest.fixture(scope="module")
def mooncake() -> Iterator[LocalMooncake]:
    with LocalMooncake(storage_bytes=64 << 20) as running:
        yield running


def roles(
    vllm_config: Any, master: str, *names: str, role: str = "kv_both", **options: Any
) -> tuple[Any, Any]:
    """Makers of a scheduler's and of a worker's connector: vLLM's MultiConnector of several."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    child = {
        "KVPrismConnector": {
            "kv_connector": "KVPrismConnector",
            "kv_connector_module_path": "kvprism.vllm",
            "kv_role": role,
            "kv_connector_extra_config": {"master_server_address": master, **options},
        },
        "DecodeBenchConnector": {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"},
    }
    transfer = child[names[0]]
    if len(names) > 1:
        children = [child[name] for name in names]
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": children},
        }
    vllm_config.kv_transfer_config = KVTransferConfig(**transfer)
    cls = KVConnectorFactory.get_connector_class(vllm_config.kv_transfer_config)

    def worker(config: Any, rank: int) -> Any:
        own = copy.copy(vllm_config)
        own.parallel_config = copy.copy(vllm_config.parallel_config)
        own.parallel_config.rank = rank
        return cls(own, KVConnectorRole.WORKER, config)

    return lambda config: cls(vllm_config, KVConnectorRole.SCHEDULER, config), worker


def words_of(workers: list[Any]) -> dict[tuple[int, int], Any]:
    """As vLLM collects them: of those who have something to say."""
    told = {(stage, 0): each.get_handshake_metadata() for stage, each in enumerate(workers)}
    return {place: words for place, words in told.items() if words is not None}


def spoken_by(workers: list[Any]) -> dict[tuple[int, int], Any]:
    """As words_of, where each is the only connector of its process."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    words = {}
    with pytest.MonkeyPatch.context() as patch:
        for stage, worker in enumerate(workers):
            patch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker)
            words[stage, 0] = worker.get_handshake_metadata()
    return words


NO_TOKENS = SimpleNamespace(
    num_scheduled_tokens={},
    kv_connector_block_state=None,
    preempted_req_ids=None,
    has_sync_kv_loads=False,
)


def keys_of_a_lookup(half: Any) -> int:
    core = half._half()._core
    assert core.lookup(1, 100, [bytes([at]) * 32 for at in range(4)]) is None
    core.end_step()
    return int(core.counters()["lookup_keys"])


def test_workers_tell_the_scheduler_which_groups_they_hold(mooncake: LocalMooncake) -> None:
    vllm_config, stages, whole = two_stages()
    scheduler, worker = roles(vllm_config, mooncake.master, "KVPrismConnector")
    half = scheduler(whole)
    told = words_of([worker(config, rank) for rank, config in enumerate(stages)])
    assert list(told) == [(0, 0)], "the stage that lacks a group speaks"
    for _ in range(2):  # since 0.33 it may come again
        half.set_xfer_handshake_metadata_pp_aware({**told, (0, 1): object()})
        half.set_xfer_handshake_metadata_pp_aware(told)
    # Three blocks of attention on both stages, and of windows on one.
    assert keys_of_a_lookup(half) == 3 * 2 + 3
    half.shutdown()


def test_a_stage_that_forgets_what_may_be_transferred_is_refused(mooncake: LocalMooncake) -> None:
    """vLLM does so where a stage holds a part of such a group (D9); its plans would be refused."""
    vllm_config, stages, whole = two_stages(first_has_window=True)
    (window,) = (
        gid
        for gid, group in enumerate(whole.kv_cache_groups)
        if type(group.kv_cache_spec).__name__ == "SlidingWindowSpec"
    )
    local = [copy.deepcopy(config) for config in (whole, *stages)]
    for config in local:
        config.kv_cache_groups[window].enable_kv_transfer = False
    scheduler, worker = roles(vllm_config, mooncake.master, "KVPrismConnector")
    half = scheduler(local[0])
    remembered = [worker(config, rank) for rank, config in enumerate(local[1:])]
    forgotten = [worker(config, rank) for rank, config in enumerate(stages)]
    half.set_xfer_handshake_metadata_pp_aware(spoken_by(remembered))
    with pytest.raises(kvprism.ConfigError) as caught:
        half.set_xfer_handshake_metadata_pp_aware(spoken_by([remembered[0], forgotten[1]]))
    assert (
        f"rank (1, 0): groups[{window}].enable_kv_transfer = 'true': expected 'false', as in the "
        "scheduler"
    ) in str(caught.value)
    assert "rank (0, 0)" not in str(caught.value)
    half.shutdown()


def test_stages_are_heard_anew_while_nothing_is_under_way(
    mooncake: LocalMooncake, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_config, stages, whole = two_stages()
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    scheduler, worker = roles(vllm_config, mooncake.master, "KVPrismConnector")
    half = scheduler(whole)
    told = words_of([worker(config, rank) for rank, config in enumerate(stages)])
    half.set_xfer_handshake_metadata_pp_aware({})
    side = half._half()
    core, before = side._core, side._described
    assert keys_of_a_lookup(half) == 3 * 2 + 3 * 2, "who says nothing holds all"
    half.build_connector_meta(NO_TOKENS)
    half.get_kv_connector_stats()
    half.set_xfer_handshake_metadata_pp_aware({})
    assert side._core is core
    assert side._described is before, "the same words"
    half.set_xfer_handshake_metadata_pp_aware(told)
    assert side._core is not core
    assert keys_of_a_lookup(half) == 3 * 2 + 3
    (spoken,) = {half.build_connector_meta(NO_TOKENS).stages} - {()}
    assert [words.groups for words in spoken] == [told[0, 0].groups, (0, 1)]
    # With a request in hand what was before is kept, on both sides.
    core, before = side._core, side._described
    side._requests["a"] = object()
    half.set_xfer_handshake_metadata_pp_aware({})
    del side._requests["a"]
    assert (side._core, side._described) == (core, before)
    assert (
        "kvprism: the pipeline stages were told of anew while requests or jobs are under way: "
        "what they were before is kept"
    ) in caplog.text
    half.shutdown()


@pytest.mark.parametrize("lookup", [True, False])
def test_a_producer_looks_up_unless_it_shall_not(lookup: bool, mooncake: LocalMooncake) -> None:
    vllm_config, _, whole = two_stages(first_has_window=True)
    vllm_config.parallel_config.pipeline_parallel_size = 1
    options = {} if lookup else {"enable_lookup": False}
    name = "KVPrismConnector"
    half = roles(vllm_config, mooncake.master, name, role="kv_producer", **options)[0](whole)
    hashes = [bytes([at]) * 32 for at in range(4)]
    request = SimpleNamespace(request_id="a", num_tokens=100, num_prompt_tokens=100)
    request.block_hashes, request.kv_transfer_params, request.lora_request = hashes, None, None
    assert half.get_num_new_matched_tokens(request, 0) == ((None, False) if lookup else (0, False))
    assert half._half().counters()["lookups"] == lookup
    half.shutdown()


def test_who_only_gives_memory_may_have_any_cache(mooncake: LocalMooncake) -> None:
    """W-C27: nothing is named, found or moved."""
    import torch
    from vllm.v1.kv_cache_interface import (
        CrossAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
    )

    vllm_config = one_stage()
    shape = {"block_size": 32, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
    state = MambaSpec(block_size=64, shapes=((4, 4),), dtypes=(torch.float32,))
    assert state.mamba_cache_mode == "none"
    groups = [KVCacheGroupSpec(["0"], CrossAttentionSpec(**shape)), KVCacheGroupSpec(["1"], state)]
    odd = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    gives = {"mode": "embedded", "global_segment_size": 32 << 20}
    names = {"enable_lookup": False, **gives}
    with pytest.raises(kvprism.Error, match="mamba_cache_mode"):
        roles(vllm_config, mooncake.master, "KVPrismConnector", **names)[0](odd)
    scheduler, worker = roles(
        vllm_config, mooncake.master, "KVPrismConnector", role="kv_consumer", **names
    )
    half, one = scheduler(odd), worker(odd, 0)
    before = pool_bytes(mooncake)
    for _ in range(2):
        one.register_kv_caches({})
    assert pool_bytes(mooncake) == before + (32 << 20)
    assert one.get_handshake_metadata() is None
    half.set_xfer_handshake_metadata_pp_aware({})
    half.bind_gpu_block_pool(object())
    request = SimpleNamespace(request_id="a")
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    half.update_state_after_alloc(request, None, 0)
    step = half.build_connector_meta(NO_TOKENS)
    assert step == StepMetadata()
    one.bind_connector_metadata(step)
    one.wait_for_save()
    assert not one.get_transfer_results(set()).finished_recving
    assert one.build_connector_worker_meta() is None
    one.clear_connector_metadata()
    half.update_connector_output(SimpleNamespace(kv_connector_worker_meta=None))
    half.register_finished_partial_tail(request, ([], []), [(1, 3, 64)])
    assert half.request_finished_all_groups(request, ([], [])) == (False, None)
    assert list(half.take_events()) == []
    assert half.reset_cache() is True
    assert not half.has_pending_push_work()
    assert half.get_kv_connector_stats() is None
    assert one.get_kv_connector_stats() is None
    for each in (half, one, half, one):
        each.shutdown()
    assert pool_bytes(mooncake) == before


def pool_bytes(mooncake: LocalMooncake) -> int:
    """What all segments of the pool have together, as the master tells it."""
    with open_local(f"http://{mooncake.metrics}/metrics") as answer:
        text = answer.read().decode()
    (line,) = re.findall(r"^master_total_capacity_bytes (\S+)$", text, re.MULTILINE)
    return int(float(line))


def test_who_only_gives_memory_answers_every_call() -> None:
    from kvprism.vllm.idle_side import IdleSide
    from kvprism.vllm.scheduler_side import SchedulerSide

    public = {name for name in vars(SchedulerSide) if not name.startswith("_")}
    assert public == {name for name in vars(IdleSide) if not name.startswith("_")}
    for name in public:
        assert inspect.signature(getattr(IdleSide, name)) == inspect.signature(
            getattr(SchedulerSide, name)
        )


@pytest.mark.parametrize("first", ["KVPrismConnector", "DecodeBenchConnector"])
def test_stages_beside_a_connector_that_knows_of_none(
    first: str,
    mooncake: LocalMooncake,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM hands the words of any child to all, and most refuse those of a second stage."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    vllm_config, stages, whole = two_stages(first_has_window=True)
    names = sorted(("KVPrismConnector", "DecodeBenchConnector"), key=lambda name: name != first)
    scheduler, worker = roles(vllm_config, mooncake.master, *names)
    both = scheduler(whole)
    workers = [worker(config, rank) for rank, config in enumerate(stages)]
    told = words_of(workers)
    assert told == {}
    both.set_xfer_handshake_metadata_pp_aware(told)
    at = names.index("KVPrismConnector")
    half = both.sub_connectors[at]
    step = half.build_connector_meta(NO_TOKENS)
    for each in workers:
        each.sub_connectors[at].bind_connector_metadata(step)
    assert "pipeline stage" not in caplog.text
    assert keys_of_a_lookup(half) == 2 * 3 * 2
    both.shutdown()


def test_only_the_last_stage_comes_to_the_end_of_each_step(mooncake: LocalMooncake) -> None:
    """With a drafter inner stages never do: what they have not submitted has not failed."""
    vllm_config, _, _ = two_stages()
    vllm_config.parallel_config.tensor_parallel_size = 2
    _, worker = roles(vllm_config, mooncake.master, "KVPrismConnector")
    groups = halves.configuration()
    inner = []
    for rank in range(4):
        one = worker(groups, rank)
        one.register_kv_caches(halves.memory_of(groups))
        inner.append(one._worker._inner)
        one.shutdown()
    assert inner == [True, True, False, False]


def test_a_stage_that_was_not_heard_says_so(
    mooncake: LocalMooncake, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handshake of another child of MultiConnector has come in place of ours."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    vllm_config, stages, whole = two_stages()
    (lacking,) = {0, 1} - set(cache_config.held_groups(stages[0]))
    scheduler, worker = roles(vllm_config, mooncake.master, "KVPrismConnector")
    half = scheduler(whole)
    half.set_xfer_handshake_metadata_pp_aware({(0, 0): object(), (1, 0): object()})
    step, later = (half.build_connector_meta(NO_TOKENS) for _ in range(2))
    assert later == StepMetadata(step=2), "it is told once"
    for rank, config in enumerate(stages):
        worker(config, rank).bind_connector_metadata(step)
    half.shutdown()
    lines = {record.getMessage() for record in caplog.records}
    (line,) = (line for line in lines if "pipeline stage" in line)
    assert line == (
        f"kvprism: pipeline stage 0 holds groups [{1 - lacking}], and the scheduler, which has not "
        "heard so, takes it to hold [0, 1]: nothing will be found; in MultiConnector kvprism must "
        "be the first child that shakes hands"
    )


def test_a_stage_with_other_names_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    vllm_config, stages, _ = two_stages(first_has_window=True)
    _, worker = roles(vllm_config, "127.0.0.1:1", "KVPrismConnector")
    one = worker(stages[1], 1)
    own = cache_config.describe(vllm_config, stages[1], (32, 32), "").schema.fingerprint
    right, wrong = StageMetadata((0, 1), own), StageMetadata((0, 1), "0" * 32)
    one.bind_connector_metadata(StepMetadata(stages=(wrong, right)))
    assert "pipeline stage" not in caplog.text
    one.bind_connector_metadata(StepMetadata(stages=(right, wrong)))
    assert (
        f"kvprism: pipeline stage 1 names its objects with the fingerprint {own}, and the "
        f"scheduler with {'0' * 32}: nothing will be found; layers of one group differ in "
        "size, and this stage begins with another one"
    ) in caplog.text


def test_a_scheduler_that_has_heard_of_no_stage_ends_without_a_core(
    mooncake: LocalMooncake,
) -> None:
    vllm_config, _, whole = two_stages()
    scheduler, _ = roles(vllm_config, mooncake.master, "KVPrismConnector")
    half = scheduler(whole)
    half.shutdown()
    half.shutdown()
    assert "_core" not in vars(half._half())


def changed_by_its_model(vllm_config: Any) -> Any:
    """A worker's configuration as models of vLLM leave it: its cache's dtype and their own."""
    own = copy.deepcopy(vllm_config)
    own.cache_config.cache_dtype = "fp8_ds_mla"
    own.model_config.hf_config.written_by_its_model = True
    return own


def test_what_a_model_makes_of_the_configuration_is_heard(
    mooncake: LocalMooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler in another process than the workers has the configuration of before."""
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.v1.core.kv_cache_utils import init_none_hash

    groups, vllm_config = halves.configuration(), one_stage()
    make_scheduler, _ = roles(vllm_config, mooncake.master, "KVPrismConnector")
    _, make_worker = roles(changed_by_its_model(vllm_config), mooncake.master, "KVPrismConnector")
    scheduler, worker = make_scheduler(groups), make_worker(groups, 0)
    assert words_of([worker]) == {}, "in MultiConnector it is silent"
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker)
    before = scheduler._half()._described.schema.fingerprint
    for _ in range(2):
        scheduler.set_xfer_handshake_metadata_pp_aware(words_of([worker]))
        known = scheduler._half()._described
        assert known.facts["kv_quantization"] == "fp8_ds_mla"
        assert known.schema.fingerprint == worker._describe().schema.fingerprint != before

    # And so a plan is taken.
    init_none_hash(halves._hash)
    engine = halves.Engine(mooncake, scheduler._half()._described)
    half = halves.make_worker(mooncake, groups, worker._describe())
    tokens = list(range(2 * halves.BLOCK))
    engine.allocate(engine.request("a", tokens), len(tokens))
    halves.run(half, engine, engine.step(a=len(tokens)))
    assert half._worker.group_counters()[0]["stored_objects"] == 2
    half.close()
    engine.half.close()
    scheduler.shutdown()


def test_ranks_that_say_otherwise_of_their_bytes_are_refused(mooncake: LocalMooncake) -> None:
    vllm_config, stages, whole = two_stages(first_has_window=True)
    make_scheduler, one = roles(vllm_config, mooncake.master, "KVPrismConnector")
    _, other = roles(changed_by_its_model(vllm_config), mooncake.master, "KVPrismConnector")
    words = spoken_by([one(stages[0], 0), other(stages[1], 1)])
    scheduler = make_scheduler(whole)
    with pytest.raises(kvprism.ConfigError) as caught:
        scheduler.set_xfer_handshake_metadata_pp_aware(words)
    assert str(caught.value) == (
        "what ranks say of their bytes: 2 problems\n"
        "  rank (1, 0): config.written_by_its_model = True: expected None, as on rank (0, 0)\n"
        "  rank (1, 0): kv_quantization = 'fp8_ds_mla': expected 'auto', as on rank (0, 0)"
    )
    scheduler.shutdown()


def test_loads_of_before_a_second_registration_are_told_once(
    mooncake: LocalMooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in the memory now, it is not what was loaded: such a request is computed."""
    from vllm.v1.core.kv_cache_utils import init_none_hash

    groups = halves.configuration()
    _, make_worker = roles(one_stage(), mooncake.master, "KVPrismConnector")
    worker = make_worker(groups, 0)
    init_none_hash(halves._hash)
    engine = halves.Engine(mooncake, worker._describe(), lookup_timeout_seconds=60)
    tokens = [31, *halves.TOKENS[1:]]

    def loading(name: str) -> Any:
        request = engine.request(name, tokens)
        end = time.monotonic() + 60
        while (found := engine.half.lookup(request, 0)[0]) is None:
            assert time.monotonic() < end
            engine.step()
        assert found == 4 * halves.BLOCK
        engine.allocate(request, 4 * halves.BLOCK, external=4 * halves.BLOCK)
        return engine.step()

    def until_idle() -> list[Any]:
        told = []
        end = time.monotonic() + 60
        while engine.half.counters()["ledger"]["alive"]:
            assert time.monotonic() < end
            told.append(worker.get_transfer_results(set()))
            words = worker.build_connector_worker_meta()
            engine.half.take_output(SimpleNamespace(kv_connector_worker_meta=words))
        return [each for each in told if each.finished_recving or each.failed_recving]

    def late(*arguments: Any, **options: Any) -> Any:
        return kvprism.inject_faults(open_store(*arguments, **options), delay_seconds=0.5, delay=1)

    open_store = worker_side.open_store
    with monkeypatch.context() as patch:
        patch.setattr(worker_side, "open_store", late)
        worker.register_kv_caches(halves.memory_of(groups))
    saved = engine.request("saved", tokens)
    engine.allocate(saved, len(tokens))
    worker.bind_connector_metadata(engine.step(saved=len(tokens)))
    worker.clear_connector_metadata()
    until_idle()
    worker.bind_connector_metadata(loading("loads"))
    worker.clear_connector_metadata()
    worker.bind_connector_metadata(loading("bound"))
    worker.register_kv_caches(halves.memory_of(groups))
    first = worker.get_transfer_results(set())
    assert (first.finished_recving, first.failed_recving) == ({"loads"}, {"loads"})
    assert worker.get_block_ids_with_load_errors() == set()
    worker.clear_connector_metadata()
    (later,) = until_idle()
    assert (later.finished_recving, later.failed_recving) == ({"bound"}, set())
    counters = engine.half.counters()
    assert (counters["loads"], counters["ledger"]["unknown_notices"]) == (2, 0)
    assert not engine.half.pending_work()
    worker.shutdown()
    engine.half.close()


def test_caches_are_not_registered_again_below_calls_that_go_on(
    mooncake: LocalMooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, make_worker = roles(one_stage(), mooncake.master, "KVPrismConnector")
    groups = halves.configuration()
    worker = make_worker(groups, 0)
    worker.register_kv_caches(halves.memory_of(groups))
    monkeypatch.setattr(worker_side.WorkerSide, "close", lambda _: 3)
    with pytest.raises(kvprism.ConfigError) as caught:
        worker.register_kv_caches(halves.memory_of(groups))
    assert str(caught.value) == (
        "caches that are registered again: 1 problem\n"
        "  calls of Mooncake that have not ended = 3: expected 0"
    )
    monkeypatch.undo()
    worker.shutdown()


@pytest.mark.parametrize(("outer", "ours"), [("fail", ""), ("recompute", ""), ("fail", "fail")])
def test_the_policy_of_an_outer_connector_is_its_own(
    outer: str,
    ours: str,
    mooncake: LocalMooncake,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.kv_transfer import kv_transfer_state

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    vllm_config, groups = one_stage(), halves.configuration()
    options = {"load_failure_policy": ours} if ours else {}
    names = ("KVPrismConnector", "DecodeBenchConnector")
    _, make_worker = roles(vllm_config, mooncake.master, *names, **options)
    vllm_config.kv_transfer_config.kv_load_failure_policy = outer
    both = make_worker(groups, 0)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", both)
    both.sub_connectors[0].register_kv_caches(halves.memory_of(groups))
    told = [line.getMessage() for line in caplog.records if "has no effect" in line.getMessage()]
    wanted = [
        "kvprism: load_failure_policy 'recompute' has no effect in MultiConnector, whose own is "
        "'fail': set kv_load_failure_policy there"
    ]
    assert list(dict.fromkeys(told)) == (wanted if (outer, ours) == ("fail", "") else [])
    both.sub_connectors[0].shutdown()
