"""The scheduler's half with vLLM's own requests and block pool, and a real Mooncake; no engine."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import kvprism
import pytest
from kvprism import StepPlan, StoreScheduler
from kvprism.local_mooncake import LocalMooncake
from kvprism.vllm import cache_config, control_file, scheduler_side, worker_side
from kvprism.vllm.events import Announcer
from kvprism.vllm.metadata import StepMetadata
from kvprism.vllm.mooncake import open_store
from kvprism.vllm.options import read_options
from kvprism.vllm.scheduler_side import SchedulerSide
from kvprism.vllm.worker_side import Results, WorkerSide

pytestmark = pytest.mark.xdist_group("halves")

BLOCK = 32
BLOCKS = 64


@pytest.fixture(scope="module")
def mooncake() -> Iterator[LocalMooncake]:
    with LocalMooncake(storage_bytes=64 << 20) as running:
        yield running


def configuration(window: int | None = None) -> Any:
    """One group of two layers, with the memory that they need."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        SlidingWindowSpec,
    )

    shape = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    spec = (
        SlidingWindowSpec(sliding_window=window, **shape) if window else FullAttentionSpec(**shape)
    )
    page = spec.page_size_bytes
    tensor = KVCacheTensor(
        size=2 * BLOCKS * page, layers=["a", "b"], layer_stride=BLOCKS * page, block_stride=page
    )
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=["a", "b"], kv_cache_spec=spec)],
        kv_cache_layout="LBHNC",
    )


@pytest.fixture(scope="module")
def described() -> Any:
    return describe(configuration())


def describe(config: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_utils import init_none_hash

    vllm_config = EngineArgs(
        model=str(conftest.model("llama")), enforce_eager=True, block_size=BLOCK
    ).create_engine_config()
    init_none_hash(_hash)
    return cache_config.describe(vllm_config, config, (BLOCK, BLOCK), "halves")


def _hash(value: Any) -> bytes:
    from vllm.utils.hashing import sha256

    return sha256(value)


class Engine:
    """What vLLM's scheduler does around the connector, as far as it matters here."""

    def __init__(
        self,
        mooncake: LocalMooncake,
        described: Any,
        announcer: Announcer | None = None,
        **options: Any,
    ) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        chosen = read_options({"master_server_address": mooncake.master, **options}, {})
        self.half = SchedulerSide(described, chosen, loads=True, saves=True, announcer=announcer)
        self.half.bind_pool(self.pool)
        self.tables: dict[str, list[Any]] = {}
        self.preempted: set[str] | None = None

    def request(self, name: str, tokens: list[int], adapter: Any = None, **parameters: Any) -> Any:
        from vllm import SamplingParams
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        request = Request(
            name,
            tokens,
            SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": parameters or None}),
            None,
            lora_request=adapter,
            block_hasher=get_request_block_hasher(BLOCK, _hash),
        )
        self.half.new_request(request)
        return request

    def allocate(self, request: Any, tokens: int, external: int = 0) -> None:
        count = -(-tokens // BLOCK)
        table = self.tables.setdefault(request.request_id, [])
        table.extend(self.pool.get_new_blocks(count - len(table)))
        ids = ([block.block_id for block in table],)
        self.half.allocated(request, SimpleNamespace(get_block_ids=lambda: ids), external)

    def step(self, *, sibling_loads: bool = False, **scheduled: int) -> Any:
        def table(name: str) -> tuple[list[int], ...] | None:
            return ([block.block_id for block in self.tables[name]],) if name in scheduled else None

        state = SimpleNamespace(get_block_ids=table, boundary_state_offloads={})
        return self.half.end_step(
            SimpleNamespace(
                num_scheduled_tokens=scheduled,
                kv_connector_block_state=state,
                preempted_req_ids=self.preempted,
                has_sync_kv_loads=sibling_loads,
            )
        )

    def free(self, request: Any) -> None:
        self.half.finished(request)
        self.pool.free_blocks(reversed(self.tables.pop(request.request_id)))


@pytest.fixture
def engine(mooncake: LocalMooncake, described: Any) -> Iterator[Engine]:
    made = Engine(mooncake, described)
    yield made
    made.half.close()


TOKENS = list(range(4, 4 + 4 * BLOCK + 1))


def test_blocks_of_a_save_stay_in_use_when_their_request_has_gone(engine: Engine) -> None:
    request = engine.request("a", TOKENS)
    engine.allocate(request, len(TOKENS))
    free = engine.pool.get_num_free_blocks()
    metadata = engine.step(a=len(TOKENS))
    assert metadata.plan
    assert metadata.loads == metadata.refused == ()
    assert engine.half.pending_work()
    engine.free(request)
    # The fifth block is not full and not saved.
    assert engine.pool.get_num_free_blocks() == free + 1
    assert engine.half.counters()["block_ids_read"] == 4


def test_a_decode_step_costs_nothing_once_the_prompt_is_saved(engine: Engine) -> None:
    request = engine.request("a", TOKENS)
    engine.allocate(request, len(TOKENS))
    assert engine.step(a=len(TOKENS)).plan
    request.num_computed_tokens = len(TOKENS)
    request.append_output_token_ids(list(range(100, 100 + 2 * BLOCK)))
    assert not engine.half._saving
    assert engine.step(a=1).plan == b""


def saved_blocks(plan: bytes) -> list[int]:
    moved = StepPlan.decode(plan)
    return [block for job in range(1, 10) for block in moved.blocks(job)]


def test_a_prompt_is_saved_once_saving_is_no_longer_held_back(engine: Engine) -> None:
    request = engine.request("a", TOKENS)
    engine.allocate(request, len(TOKENS))
    engine.half._set_mode("read_only")
    assert not engine.step(a=len(TOKENS)).plan
    request.num_computed_tokens = len(TOKENS)
    request.append_output_token_ids(7)
    assert not engine.step(a=1).plan
    engine.half._set_mode("read_write")
    table = [block.block_id for block in engine.tables["a"]]
    assert saved_blocks(engine.step(a=1).plan) == table[:4]


def test_what_is_kept_of_a_window_is_before_the_prompts_end_also_after_a_preemption(
    mooncake: LocalMooncake,
) -> None:
    """The answer is computed anew with the prompt, and is not saved (D14)."""
    config = configuration(window=BLOCK + 8)
    config.prefix_cache_retention_interval = 0
    engine = Engine(mooncake, describe(config))
    request = engine.request("a", TOKENS)
    engine.half._set_mode("off")
    engine.allocate(request, len(TOKENS))
    engine.step(a=len(TOKENS))
    request.append_output_token_ids(list(range(100, 100 + 2 * BLOCK)))
    engine.pool.free_blocks(reversed(engine.tables.pop("a")))
    request.num_computed_tokens = 0
    engine.preempted = {"a"}
    engine.step()
    engine.preempted = None
    engine.half._set_mode("read_write")
    end = time.monotonic() + 60
    while (found := engine.half.lookup(request, 0)[0]) is None:
        assert time.monotonic() < end
        engine.step()
    assert found == 0
    engine.allocate(request, request.num_tokens)
    table = [block.block_id for block in engine.tables["a"]]
    assert saved_blocks(engine.step(a=request.num_tokens).plan) == table[2:4]
    engine.half.close()


def test_calls_for_unknown_and_repeated_requests_are_harmless(engine: Engine) -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    stranger = Request("stranger", TOKENS, SamplingParams(), None)
    engine.half.finished(stranger)
    request = engine.request("a", TOKENS)
    engine.half.new_request(request)
    engine.allocate(request, BLOCK, 0)
    engine.allocate(request, BLOCK, 0)
    engine.half.finished(request)
    engine.half.finished(request)
    assert engine.step().plan == b""
    assert not engine.half.pending_work()


def test_a_load_that_was_never_offered_is_reported_failed(engine: Engine) -> None:
    """vLLM waits for it whatever we think."""
    request = engine.request("a", TOKENS)
    engine.allocate(request, 2 * BLOCK, external=2 * BLOCK)
    assert engine.half.pending_work()
    metadata = engine.step()
    assert metadata.refused == ("a",)
    assert engine.step().refused == ()
    assert not engine.half.pending_work()


def test_tokens_that_change_are_never_saved_under_their_old_names(engine: Engine) -> None:
    """A streaming session cuts its hashes where its tokens change."""
    request = engine.request("a", TOKENS)
    engine.allocate(request, len(TOKENS))
    engine.step(a=2 * BLOCK)
    number = engine.half._requests["a"].number
    request.num_computed_tokens = 2 * BLOCK
    request.block_hashes[3] = b"\1" * 32
    engine.step(a=2 * BLOCK + 1)
    assert engine.half._requests["a"].number != number
    metadata = engine.step(a=2 * BLOCK + 1)
    assert b"\1" * 32 in metadata.plan


@pytest.fixture
def purging(
    mooncake: LocalMooncake, described: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    """An engine whose purges are over soon: nothing here reads what they leave.

    Its core refuses calls that break the contract.
    """
    checked = functools.partial(StoreScheduler, checked=True)
    monkeypatch.setattr(scheduler_side, "StoreScheduler", checked)
    made = Engine(mooncake, described, purge_settle_seconds=0.01)
    yield made
    made.half.close()


def finish_purge(engine: Engine, worker: WorkerSide | None = None) -> None:
    end = time.monotonic() + 60
    while engine.half._core.purge_status()["state"] != "done":
        assert time.monotonic() < end
        metadata = engine.step()
        assert not metadata.plan
        if worker is not None:
            idle(worker, metadata)


def idle(worker: WorkerSide, metadata: StepMetadata) -> None:
    """A step in which a worker has nothing to do."""
    worker.bind(metadata)
    worker.submit()
    worker.take_results()
    worker.clear()


def test_tokens_of_before_a_reset_are_not_saved_however_few(purging: Engine) -> None:
    request = purging.request("a", TOKENS)
    purging.allocate(request, len(TOKENS))
    assert not purging.step(a=BLOCK - 1).plan, "too few to tell the core"
    request.num_computed_tokens = BLOCK - 1
    purging.half.purge()
    finish_purge(purging)
    assert not purging.step(a=BLOCK + 1).plan
    # A streaming session whose tokens change keeps its blocks.
    request.num_computed_tokens = 2 * BLOCK
    request.block_hashes[1] = b"\2" * 32
    purging.half.new_request(request)
    assert not purging.step(a=BLOCK).plan
    # Preempted, it is computed anew.
    request.num_computed_tokens = 0
    purging.preempted = {"a"}
    assert b"\2" * 32 in purging.step(a=4 * BLOCK).plan


def test_what_a_reset_has_preempted_is_saved_again(
    purging: Engine, mooncake: LocalMooncake, described: Any
) -> None:
    request = purging.request("a", TOKENS)
    purging.allocate(request, len(TOKENS))
    worker = make_worker(mooncake, configuration(), described)
    run(worker, purging, purging.step(a=len(TOKENS)))
    worker.close()
    request.num_computed_tokens = 0  # vLLM preempts before it resets the connector
    purging.half.purge()
    purging.preempted = {"a"}
    assert not purging.step(a=len(TOKENS)).plan
    purging.preempted = None
    request.num_computed_tokens = len(TOKENS)
    finish_purge(purging)
    assert purging.step(a=1).plan
    # A checked scheduler reads whole tables, of two saves.
    assert purging.half.counters()["block_ids_read"] == 10


def test_what_was_preempted_before_a_reset_is_saved_after_it(
    purging: Engine, mooncake: LocalMooncake, described: Any
) -> None:
    """It waits for blocks, and no later list of preempted requests has it."""
    request = purging.request("a", TOKENS)
    purging.allocate(request, len(TOKENS))
    worker = make_worker(mooncake, configuration(), described)
    run(worker, purging, purging.step(a=2 * BLOCK))
    worker.close()
    purging.pool.free_blocks(reversed(purging.tables.pop("a")))
    request.num_computed_tokens = 0
    purging.preempted = {"a"}
    purging.step()
    purging.preempted = None
    purging.half.purge()
    finish_purge(purging)
    purging.allocate(request, len(TOKENS))
    table = [block.block_id for block in purging.tables["a"]]
    assert saved_blocks(purging.step(a=len(TOKENS)).plan) == table[:4]


def test_what_a_load_brought_in_vain_before_a_reset_is_saved_after_it(
    purging: Engine, mooncake: LocalMooncake, described: Any
) -> None:
    """Of several groups vLLM gives all blocks up where a load brings less than was offered."""

    def look_up() -> int:
        end = time.monotonic() + 60
        while (found := purging.half.lookup(again, 0)[0]) is None:
            assert time.monotonic() < end
            purging.step()
        return int(found)

    worker = make_worker(mooncake, configuration(), described)
    first = purging.request("first", TOKENS)
    purging.allocate(first, len(TOKENS))
    run(worker, purging, purging.step(first=len(TOKENS)))
    purging.free(first)
    again = purging.request("again", TOKENS)
    assert look_up() == 4 * BLOCK
    purging.allocate(again, 4 * BLOCK, external=4 * BLOCK)
    run(worker, purging, purging.step())
    worker.close()
    purging.pool.free_blocks(reversed(purging.tables.pop("again")))
    purging.half.purge()
    finish_purge(purging)
    purging.half._set_mode("write_only")  # leases have kept what the load has read
    assert look_up() == 0
    purging.allocate(again, len(TOKENS))
    table = [block.block_id for block in purging.tables["again"]]
    assert saved_blocks(purging.step(again=len(TOKENS)).plan) == table[:4]


def test_a_request_whose_load_a_reset_has_overtaken_is_saved_when_it_is_computed(
    purging: Engine, mooncake: LocalMooncake, described: Any
) -> None:
    def look_up() -> int:
        end = time.monotonic() + 60
        while (found := purging.half.lookup(again, 0)[0]) is None:
            assert time.monotonic() < end
            purging.step()
        return int(found)

    writer = make_worker(mooncake, configuration(), described)
    first = purging.request("first", TOKENS)
    purging.allocate(first, len(TOKENS))
    run(writer, purging, purging.step(first=len(TOKENS)))
    purging.free(first)
    again = purging.request("again", TOKENS)
    assert look_up() == 4 * BLOCK
    purging.allocate(again, 4 * BLOCK, external=4 * BLOCK)
    again.num_computed_tokens = 4 * BLOCK  # as vLLM counts them while it waits
    purging.half.purge()
    step = purging.step()
    assert step.refused == ("again",)
    run(writer, purging, step)  # its job is on its way all the same
    finish_purge(purging)
    # vLLM takes its blocks away and begins anew.
    purging.pool.free_blocks(reversed(purging.tables.pop("again")))
    again.num_computed_tokens = 0
    assert look_up() == 0
    purging.allocate(again, len(TOKENS))
    plan = StepPlan.decode(purging.step(again=len(TOKENS)).plan)
    table = [block.block_id for block in purging.tables["again"]]
    assert [block for job in range(1, 10) for block in plan.blocks(job)] == table[:4]
    writer.close()


def test_a_reset_that_is_not_over_is_told_at_the_end(
    purging: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    purging.half.purge()
    purging.half.close()
    assert "closed while a purge was removing" in caplog.text


@pytest.fixture
def announcing(mooncake: LocalMooncake, described: Any) -> Iterator[tuple[Engine, Announcer]]:
    announcer = Announcer(configuration(), described.projection)
    made = Engine(mooncake, described, announcer, purge_settle_seconds=0.01)
    yield made, announcer
    made.half.close()


def test_a_finished_request_is_kept_while_a_save_of_it_is_in_flight(
    announcing: tuple[Engine, Announcer], mooncake: LocalMooncake, described: Any
) -> None:
    engine, announcer = announcing
    worker = make_worker(mooncake, configuration(), described)
    tokens = [7, *TOKENS[1:]]
    saved = engine.request("a", tokens)
    engine.allocate(saved, len(tokens))
    metadata = engine.step(a=len(tokens))
    engine.free(saved)
    for name in "bcd":
        engine.half.finished(engine.request(name, tokens[:BLOCK]))
    assert engine.half.take_events() == []
    assert list(announcer._finished.values()) == [saved]
    run(worker, engine, metadata)
    worker.close()
    (event,) = engine.half.take_events()
    assert event.token_ids == tokens[: 4 * BLOCK]
    assert len(event.block_hashes) == 4
    assert not announcer._finished
    assert not announcer._live


def test_blocks_of_split_contexts_are_announced_whole() -> None:
    """Two ranks of decode context hold every other token: a block stands for those of both."""
    group = {"kind": "full_attention", "layers": ["a", "b"], "block_size": BLOCK}
    group |= {"num_kv_heads": 2, "head_size": 64, "dtype": "float32"}
    config = {"num_blocks": BLOCKS, "groups": [group], "parallel": {"tp": 2, "dcp": 2}}
    config["hash_block_size"] = 2 * BLOCK
    projection = kvprism.Projection(kvprism.CacheConfig.from_dict(config))
    announcer = Announcer(configuration(), projection)
    tokens = list(range(5 * BLOCK))
    hashes = [bytes([at]) * 32 for at in range(3)]
    request = SimpleNamespace(all_token_ids=tokens, block_hashes=hashes[1:], mm_features=[])
    request.lora_request = request.cache_salt = request.prompt_embeds = None
    announcer.begin(1, request)
    changes = [
        SimpleNamespace(
            stored=True,
            request=1,
            group=0,
            chunk=at,
            tokens=2 * BLOCK * (at + 1),
            hash=hashes[at + 1],
            parent=hashes[at] if at else b"",
        )
        for at in range(2)
    ]
    (event,) = announcer.events(changes)  # type: ignore[arg-type]
    assert event.block_size == 2 * BLOCK
    assert event.token_ids == tokens[: 4 * BLOCK]
    assert len(event.block_hashes) == 2


def test_what_was_stored_by_a_request_that_nobody_knows_is_not_announced(
    announcing: tuple[Engine, Announcer], mooncake: LocalMooncake, described: Any
) -> None:
    engine, announcer = announcing
    worker = make_worker(mooncake, configuration(), described)
    tokens = [8, *TOKENS[1:]]
    request = engine.request("a", tokens)
    engine.allocate(request, len(tokens))
    metadata = engine.step(a=len(tokens))
    engine.free(request)
    announcer._finished.clear()
    run(worker, engine, metadata)
    worker.close()
    assert engine.half.counters()["saved_objects"] == 4
    assert engine.half.take_events() == []


def test_a_reset_is_announced_and_nothing_of_before_it(
    announcing: tuple[Engine, Announcer], mooncake: LocalMooncake, described: Any
) -> None:
    from vllm.distributed.kv_events import AllBlocksCleared

    engine, _ = announcing
    worker = make_worker(mooncake, configuration(), described)
    for name, first in (("a", 9), ("b", 10)):
        tokens = [first, *TOKENS[1:]]
        request = engine.request(name, tokens)
        engine.allocate(request, len(tokens))
        metadata = engine.step(**{name: len(tokens)})
        if name == "a":
            run(worker, engine, metadata)
    engine.half.purge()
    assert [type(event) for event in engine.half.take_events()] == [AllBlocksCleared]
    run(worker, engine, metadata)
    worker.close()
    finish_purge(engine)
    assert engine.half.take_events() == []


def test_health_is_told_when_nothing_else_has_changed(engine: Engine) -> None:
    engine.half._core.set_mode("off")
    engine.step()
    stats = engine.half.take_stats()
    assert stats is not None
    assert stats.data == {"health": 2, "mode": 3, "index.usable": 1}
    assert engine.half.take_stats() is None
    engine.half._core.set_mode("read_write")
    engine.step()
    stats = engine.half.take_stats()
    assert stats is not None
    assert stats.data == {"health": -2, "mode": -3}


def test_a_file_says_what_the_store_is_used_for(
    mooncake: LocalMooncake,
    described: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    every = functools.partial(control_file.ControlFile, every_seconds=0.01)
    monkeypatch.setattr(scheduler_side, "ControlFile", every)
    file = tmp_path / "control.json"

    def write(content: str) -> None:
        (tmp_path / "next").write_text(content)
        (tmp_path / "next").replace(file)

    def until(reached: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not reached():
            assert time.monotonic() < end
            assert not engine.step().plan

    write('{"mode": "read_only"}')
    engine = Engine(mooncake, described, control_file=str(file))
    core = engine.half._core
    request = engine.request("a", TOKENS)
    engine.allocate(request, len(TOKENS))
    assert not engine.step(a=len(TOKENS)).plan, "it was read before the first step"
    assert core.mode == "read_only"
    write('{"mode": "of", "modes": 1}')
    until(lambda: "modes" in caplog.text)
    write("[]")
    until(lambda: "a file with a JSON object" in caplog.text)
    file.unlink()
    until(lambda: "a file that can be read" in caplog.text)
    assert core.mode == "read_only"
    write('{"mode": "off"}')
    until(lambda: core.mode == "off")
    stats = engine.half.take_stats()
    assert stats is not None
    assert stats.data["mode"] == 3
    write('{"mode": "read_write"}')
    until(lambda: core.mode == "read_write")
    later = engine.request("b", TOKENS)
    engine.allocate(later, len(TOKENS))
    assert engine.step(b=len(TOKENS)).plan
    engine.half.close()
    engine.half.close()
    told = dict.fromkeys((line.levelno, line.getMessage()) for line in caplog.records)
    assert [text for level, text in told if level == logging.ERROR] == [
        "kvprism: control_file changes nothing:\n  "
        f"{file}: modes = 1: expected mode (did you mean 'mode'?)\n  "
        f"{file}: mode = 'of': expected one of read_write, read_only, write_only, off "
        "(did you mean 'off'?)",
        f"kvprism: control_file changes nothing:\n  control_file = '{file}': expected a file with "
        "a JSON object",
        f"kvprism: control_file changes nothing:\n  control_file = '{file}': expected a file that "
        "can be read (No such file or directory)",
    ]
    assert [text for level, text in told if level == logging.WARNING] == [
        f"kvprism: control_file sets the mode {mode}" for mode in ("read_only", "off", "read_write")
    ]


def test_a_lookup_is_asked_again_until_it_is_answered(engine: Engine) -> None:
    request = engine.request("a", [9] * (2 * BLOCK + 1))
    end = time.monotonic() + 30
    answers = []
    while not answers or answers[-1][0] is None:
        assert time.monotonic() < end
        answers.append(engine.half.lookup(request, 0))
        engine.step()
    assert answers[0] == (None, False)
    assert answers[-1] == (0, False)
    stats = engine.half.take_stats()
    assert stats is not None
    assert stats.data["lookups"] == 1
    request.skip_reading_prefix_cache = True
    assert engine.half.lookup(request, 0) == (0, False)


def test_a_client_can_keep_its_request_out_of_the_store(engine: Engine) -> None:
    request = engine.request("a", TOKENS, kvprism={"save": False})
    engine.allocate(request, len(TOKENS))
    assert engine.step(a=len(TOKENS)).plan == b""
    engine.free(request)
    unclear = engine.request("c", TOKENS, kvprism={"save": "false"})
    engine.allocate(unclear, len(TOKENS))
    assert engine.step(c=len(TOKENS)).plan == b"", "only yes means yes"
    other = engine.request("b", TOKENS, kvprism={"load": False})
    assert engine.half.lookup(other, 0) == (0, False)
    assert engine.half.counters()["lookups"] == 0
    engine.allocate(other, len(TOKENS))
    assert engine.step(b=len(TOKENS)).plan


@pytest.mark.parametrize("kept_out", [True, False])
def test_adapters_that_hashes_know_by_their_names_alone_are_kept_out(
    engine: Engine, kept_out: bool
) -> None:
    """vLLM 0.30: the adapter's path is not in the hash."""
    from vllm.lora.request import LoRARequest

    engine.half._names_adapters_alone = kept_out
    request = engine.request("a", TOKENS, adapter=LoRARequest("sql", 1, "/adapters/v1"))
    assert (engine.half.lookup(request, 0) == (0, False)) == kept_out
    assert engine.half.counters()["lookups"] == (0 if kept_out else 1)
    engine.allocate(request, len(TOKENS))
    assert bool(engine.step(a=len(TOKENS)).plan) != kept_out
    plain = engine.request("b", TOKENS)
    engine.allocate(plain, len(TOKENS))
    assert engine.step(b=len(TOKENS)).plan


def test_a_load_that_cannot_be_planned_does_not_let_its_request_wait(
    engine: Engine, mooncake: LocalMooncake, described: Any
) -> None:
    first = engine.request("a", TOKENS)
    engine.allocate(first, len(TOKENS))
    plan = engine.step(a=len(TOKENS)).plan
    worker = make_worker(mooncake, configuration(), described)
    run(worker, engine, StepMetadata(plan, (), (), ()))
    worker.close()
    again = engine.request("b", TOKENS)
    end = time.monotonic() + 60
    while (found := engine.half.lookup(again, 0))[0] is None:
        assert time.monotonic() < end
        engine.step()
    assert found == (4 * BLOCK, True)
    short = ([3, 4, 5],)  # a block less than the hit needs
    engine.half.allocated(again, SimpleNamespace(get_block_ids=lambda: short), 4 * BLOCK)
    metadata = engine.step()
    assert metadata.plan == b""
    assert metadata.loads == ()
    assert metadata.refused == ("b",)
    assert engine.step().refused == ()


def test_an_offer_that_vllm_shortens_is_refused_and_holds_nothing(
    engine: Engine, mooncake: LocalMooncake, described: Any
) -> None:
    """vLLM takes all of an offer or nothing; were it otherwise, the request is computed."""
    tokens = [5, *TOKENS[1:]]
    first = engine.request("a", tokens)
    engine.allocate(first, len(tokens))
    worker = make_worker(mooncake, configuration(), described)
    run(worker, engine, engine.step(a=len(tokens)))
    engine.free(first)
    again = engine.request("b", tokens)
    end = time.monotonic() + 60
    while (found := engine.half.lookup(again, 0)[0]) is None:
        assert time.monotonic() < end
        engine.step()
    assert found == 4 * BLOCK
    engine.allocate(again, 3 * BLOCK, external=3 * BLOCK)
    free = engine.pool.get_num_free_blocks()
    metadata = engine.step()
    assert (metadata.plan, metadata.loads, metadata.refused) == (b"", (), ("b",))
    worker.bind(metadata)
    assert worker.take_results().failed == {"b"}
    worker.close()
    assert not engine.half.pending_work()
    engine.free(again)
    assert engine.pool.get_num_free_blocks() == free + 3


def go_on(request: Any, tokens: list[int]) -> None:
    """A streaming session, whose last token is discarded, gets more of its prompt from vLLM."""
    from vllm import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import StreamingUpdate

    values = {
        "mm_features": None,
        "prompt_token_ids": tokens,
        "max_tokens": 8,
        "arrival_time": 0.0,
        "sampling_params": SamplingParams(max_tokens=8),
    }
    fields = {field.name for field in dataclasses.fields(StreamingUpdate)}
    assert fields <= values.keys()
    update = StreamingUpdate(**{name: values[name] for name in fields})
    scheduler = SimpleNamespace(
        num_waiting_for_streaming_input=0, log_stats=False, hash_block_size=BLOCK
    )
    Scheduler._update_request_as_session(scheduler, request, update)


def true_hashes(request: Any) -> list[bytes]:
    """Made anew of the request's tokens."""
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    anew = copy.copy(request)
    anew.block_hashes = []
    return list(get_request_block_hasher(BLOCK, _hash)(anew))


def named_in(plan: bytes, request: Any) -> list[bool]:
    """Which of the request's blocks a plan names, each by the hash of its tokens."""
    return [name in plan for name in true_hashes(request)]


def saves_misnamed(plan: bytes, request: Any) -> bool:
    """Whether a plan names anything by what vLLM remembers of tokens that were discarded."""
    return any(
        name in plan
        for name, true in zip(request.block_hashes, true_hashes(request), strict=True)
        if name != true
    )


# Tokens of the first prompt; the first fills a block with the token that is discarded.
@pytest.mark.parametrize("first", [2 * BLOCK - 1, 2 * BLOCK + 3])
@pytest.mark.parametrize("save_decode", [False, True])
def test_a_prompt_that_grows_is_saved_on_under_the_names_of_its_tokens(
    mooncake: LocalMooncake, described: Any, first: int, save_decode: bool
) -> None:
    engine = Engine(mooncake, described, save_decode_cache=save_decode)
    request = engine.request("a", TOKENS[:first])
    engine.allocate(request, 4 * BLOCK)
    engine.step(a=first)
    request.num_computed_tokens = first
    request.append_output_token_ids(777)
    go_on(request, list(range(1000, 1000 + 4 * BLOCK - first)))
    assert request.num_tokens == 4 * BLOCK
    engine.half.allocated(request, None, 0)
    plans = engine.step(a=4 * BLOCK - first).plan
    # What the request has changed is noticed in one step, and saved in the next.
    request.num_computed_tokens = 4 * BLOCK
    plans += engine.step(a=1).plan
    assert not saves_misnamed(plans, request)
    if scheduler_side._cuts_hashes():
        assert named_in(plans, request)[first // BLOCK :] == [True] * (4 - first // BLOCK)
    else:
        assert plans == b""
    engine.half.close()


def test_names_that_vllm_makes_wrong_are_neither_saved_nor_looked_up(
    mooncake: LocalMooncake, described: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in vLLM 0.30 and 0.31, whichever version this is."""
    monkeypatch.setattr(scheduler_side, "_cuts_hashes", lambda: False)
    engine = Engine(mooncake, described, purge_settle_seconds=0.01)
    request = engine.request("a", TOKENS[: BLOCK - 1])
    engine.allocate(request, 4 * BLOCK)
    engine.step(a=BLOCK - 1)
    request.num_computed_tokens = BLOCK - 1
    request.append_output_token_ids(777)
    go_on(request, TOKENS[: 3 * BLOCK + 1])
    engine.half.allocated(request, None, 0)
    assert engine.step(a=3 * BLOCK + 1).plan == b""
    # Preempted it is not looked up.
    request.num_computed_tokens = 0
    engine.preempted = {"a"}
    assert engine.step().plan == b""
    engine.preempted = None
    assert engine.half.lookup(request, 0) == (0, False)
    assert engine.half.counters()["lookups"] == 0
    # vLLM's cache holds blocks under wrong names, on which others may rest.
    other = engine.request("b", TOKENS)
    engine.allocate(other, len(TOKENS))
    assert engine.step(b=len(TOKENS)).plan == b""
    engine.free(other)
    # While that request lives, an empty cache does not help.
    engine.half.purge()
    finish_purge(engine)
    third = engine.request("c", TOKENS)
    engine.allocate(third, len(TOKENS))
    assert engine.step(c=len(TOKENS)).plan == b""
    engine.free(third)
    engine.free(request)
    # Nor does a reset that vLLM's own cache refuses, since somebody has a block.
    held = engine.pool.get_new_blocks(1)
    engine.half.purge()
    finish_purge(engine)
    fourth = engine.request("e", TOKENS)
    engine.allocate(fourth, len(TOKENS))
    assert engine.step(e=len(TOKENS)).plan == b""
    engine.free(fourth)
    engine.pool.free_blocks(held)
    engine.half.purge()
    finish_purge(engine)
    last = engine.request("d", TOKENS)
    engine.allocate(last, len(TOKENS))
    assert engine.step(d=len(TOKENS)).plan
    engine.half.close()


def test_the_end_of_a_prompt_that_grows_is_told(mooncake: LocalMooncake) -> None:
    """Of windows nothing else may be kept: vLLM keeps what the end of the prompt needs."""
    engine = Engine(mooncake, describe(configuration(window=2 * BLOCK)))
    request = engine.request("a", TOKENS[: 2 * BLOCK])
    told: list[tuple[int, int]] = []
    core = engine.half._core
    engine.half.__dict__["_core"] = SimpleNamespace(
        allocated=core.allocated,
        take_acquired=core.take_acquired,
        prompt=lambda number, tokens: told.append((number, tokens)),
    )
    request.num_computed_tokens = 2 * BLOCK
    go_on(request, TOKENS[2 * BLOCK : 4 * BLOCK])
    engine.half.new_request(request)
    engine.half.__dict__["_core"] = core
    assert told == ([(1, 4 * BLOCK)] if scheduler_side._cuts_hashes() else [])
    engine.half.close()


@pytest.mark.parametrize("window", [None, 2 * BLOCK])
def test_what_is_kept_of_a_failed_load(window: int | None) -> None:
    """What lies before the first failed block of a prefix is valid; of a window, nothing is.

    The rest of a window's blocks may be null, so vLLM must compute the request from its start.
    """
    config = configuration(window)
    described = describe(config)
    with (
        LocalMooncake(storage_bytes=64 << 20) as full,
        LocalMooncake(storage_bytes=64 << 20) as empty,
    ):
        engine = Engine(full, described)
        writer = make_worker(full, config, described)
        request = engine.request("a", TOKENS)
        engine.allocate(request, len(TOKENS))
        run(writer, engine, engine.step(a=len(TOKENS)))
        again = engine.request("b", TOKENS)
        end = time.monotonic() + 60
        while engine.half.lookup(again, 0)[0] is None:
            assert time.monotonic() < end
            engine.step()
        engine.allocate(again, 4 * BLOCK, external=4 * BLOCK)
        # What the lookup saw is not there when it is loaded.
        reader = make_worker(empty, config, described)
        metadata = engine.step()
        reader._step = metadata.step - 1  # it has run those before
        results = run(reader, engine, metadata)
        for worker in (writer, reader):
            worker.close()
        engine.half.close()
    assert results.finished == {"b"}
    table = {block.block_id for block in engine.tables["b"]}
    if window is None:
        assert results.failed == set()
        assert results.failed_blocks == table
    else:
        assert results.failed == {"b"}
        assert results.failed_blocks == set()


def test_a_plan_that_comes_again_leaves_its_loads_alone(
    engine: Engine, mooncake: LocalMooncake, described: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be writing: told as failed, their blocks would serve other requests meanwhile."""
    tokens = [5, *TOKENS[1:]]
    writer = make_worker(mooncake, configuration(), described)
    request = engine.request("a", tokens)
    engine.allocate(request, len(tokens))
    run(writer, engine, engine.step(a=len(tokens)))
    writer.close()
    again = engine.request("b", tokens)
    end = time.monotonic() + 60
    # On a busy machine an answer may come too late, which is a miss.
    while engine.half.lookup(again, 0)[0] != 4 * BLOCK:
        assert time.monotonic() < end
        engine.step()
    engine.allocate(again, 4 * BLOCK, external=4 * BLOCK)
    metadata = engine.step()
    assert [name for _, name in metadata.loads] == ["b"]

    stores: list[kvprism.ObjectStore] = []

    def hanging(*arguments: Any, **named: Any) -> kvprism.ObjectStore:
        stores.append(kvprism.inject_faults(open_store(*arguments, **named), hang=1.0))
        return stores[-1]

    monkeypatch.setattr(worker_side, "open_store", hanging)
    reader = make_worker(mooncake, configuration(), described)
    reader._step = metadata.step - 1  # it has run those before
    for _ in range(2):
        reader.bind(metadata)
        reader.submit()
        reader.clear()
        assert reader.take_results() == Results()
    assert reader.counters()["plans_repeated"] == 1
    results = Results()
    while not results.finished:
        assert time.monotonic() < end
        stores[0].release_hung()
        results = reader.take_results()
    assert results == Results(finished={"b"})
    assert reader.take_results() == Results()
    reader.close()


def memory_of(config: Any) -> dict[str, Any]:
    """What vLLM hands to a worker's connector."""
    import torch
    from vllm.v1.kv_cache_interface import create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    (placed,) = config.kv_cache_tensors
    spec = config.kv_cache_groups[0].kv_cache_spec
    raw = torch.zeros(placed.size, dtype=torch.int8)
    layout = KVCacheLayout[config.kv_cache_layout]
    views = create_kv_cache_views(raw, spec, config.num_blocks, layout, placed, None)
    return dict(zip(placed.layers, views, strict=True))


def make_worker(
    mooncake: LocalMooncake, config: Any, described: Any, *, ranks: int = 1, inner: bool = False
) -> WorkerSide:
    options = read_options({"master_server_address": mooncake.master}, {})
    return WorkerSide(described, options, config, 0, memory_of(config), ranks=ranks, inner=inner)


def run(worker: WorkerSide, engine: Engine, metadata: StepMetadata) -> Results:
    """A step of a worker, and those after it until its jobs have been reported."""
    worker.bind(metadata)
    worker.submit()
    worker.clear()
    all_results = Results()
    reported = False
    end = time.monotonic() + 60
    while True:
        assert time.monotonic() < end
        alive = worker.counters()["jobs_alive"]  # a job's last report is there before it is not
        results = worker.take_results()
        all_results.finished |= results.finished
        all_results.failed |= results.failed
        all_results.failed_blocks |= results.failed_blocks
        reports = worker.take_reports()
        if reports is not None:
            engine.half.take_output(SimpleNamespace(kv_connector_worker_meta=reports))
            reported = reported or bool(reports.reports)
        if reported and alive == 0:
            return all_results


def test_a_request_is_preempted_and_allocated_again_in_one_step(engine: Engine) -> None:
    """As reset_prefix_cache(reset_running_requests=True) makes vLLM do it (W-C5)."""
    request = engine.request("a", TOKENS)
    engine.allocate(request, len(TOKENS))
    engine.step(a=2 * BLOCK)
    old = [block.block_id for block in engine.tables["a"]]
    engine.pool.free_blocks(reversed(engine.tables.pop("a")))
    request.num_computed_tokens = 0
    engine.allocate(request, len(TOKENS))
    new = [block.block_id for block in engine.tables["a"]]
    engine.preempted = {"a"}
    plan = engine.step(a=len(TOKENS)).plan
    sources = saved_blocks(plan)
    assert sources
    assert set(sources) <= set(new[:4])
    # The blocks of the first save, which is in flight, were not handed out again.
    assert not set(new) & set(old[:2])


# What runners of vLLM 0.30 to 0.33 call in a step, after they have bound its metadata.
ORDERS = {
    "plain": ("submit", "results", "clear"),
    "with a drafter": ("results", "submit", "clear"),
    "without forward in 0.30": ("results", "clear"),
    "of an inner pipeline rank with a drafter": ("results",),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_every_order_of_calls_submits_a_plan_once(
    engine: Engine, mooncake: LocalMooncake, described: Any, order: tuple[str, ...]
) -> None:
    request = engine.request(f"order-{order}", [len(order), *TOKENS[1:]])
    engine.allocate(request, len(TOKENS))
    metadata = engine.step(**{request.request_id: len(TOKENS)})
    assert metadata.plan
    worker = make_worker(mooncake, configuration(), described, inner=order == ("results",))
    worker.bind(metadata)
    assert worker.counters()["jobs"] == 0, "draft layers of the step are not written yet"
    for call in order:
        before = worker.counters()["jobs"]
        {"submit": worker.submit, "results": worker.take_results, "clear": worker.clear}[call]()
        if call == "results":
            assert worker.counters()["jobs"] == before, "collecting results submits nothing"
    worker.bind(StepMetadata())
    worker.submit()
    worker.clear()
    assert worker.counters()["jobs"] == 1
    worker.close()


def failing_worker(
    engine: Engine, mooncake: LocalMooncake, described: Any, name: str
) -> tuple[WorkerSide, StepMetadata]:
    """A worker, and the metadata of a step that has something to save."""
    request = engine.request(name, [len(name), *TOKENS[1:]])
    engine.allocate(request, len(TOKENS))
    metadata = engine.step(**{name: len(TOKENS)})
    assert metadata.plan
    return make_worker(mooncake, configuration(), described), metadata


def stored_and_failed(worker: WorkerSide, engine: Engine) -> tuple[Any, Any]:
    """Objects, once the worker has told of all its jobs."""
    end = time.monotonic() + 60
    while engine.half.pending_work():
        assert time.monotonic() < end
        worker.take_results()
        engine.half.take_output(SimpleNamespace(kv_connector_worker_meta=worker.take_reports()))
    counters = engine.half.counters()
    assert bool(worker.counters()["puts"]) == bool(counters["saved_objects"])
    return counters["saved_objects"], counters["save_chunks_failed"]


def test_a_step_that_fails_is_not_saved(
    engine: Engine, mooncake: LocalMooncake, described: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM ends a step in a `finally`, and layers that did not run hold what was there before."""
    worker, metadata = failing_worker(engine, mooncake, described, "fails")

    def step() -> None:
        worker.bind(metadata)
        try:
            raise MemoryError
        finally:
            worker.submit()
            worker.take_results()
            assert worker.take_reports() is None, "what vLLM throws away is told with the next step"
            worker.clear()

    with caplog.at_level(logging.ERROR, logger="vllm.kvprism"), pytest.raises(MemoryError):
        step()
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert errors[0].startswith("kvprism: a step has failed, and vLLM's own cache has its blocks")
    worker.bind(StepMetadata())
    worker.submit()
    assert stored_and_failed(worker, engine) == (0, 4)
    worker.close()


def test_after_a_failed_step_nothing_is_saved_before_a_reset(
    purging: Engine, mooncake: LocalMooncake, described: Any
) -> None:
    """vLLM has put its blocks into its own cache, where the next request of the tokens has them."""
    worker, metadata = failing_worker(purging, mooncake, described, "fails first")
    worker.bind(metadata)
    worker.bind(StepMetadata())
    worker.submit()
    assert stored_and_failed(worker, purging) == (0, 4)
    purging.free(purging.half._requests["fails first"].request)

    def again(name: str) -> None:
        request = purging.request(name, [len("fails first"), *TOKENS[1:]])
        purging.allocate(request, len(TOKENS))
        worker.bind(purging.step(**{name: len(TOKENS)}))
        worker.submit()
        worker.take_results()

    again("in between")
    assert stored_and_failed(worker, purging) == (0, 8)
    purging.half.purge()  # vLLM's own cache stays, while the request has blocks of it
    finish_purge(purging, worker)
    purging.free(purging.half._requests["in between"].request)
    again("still")
    assert stored_and_failed(worker, purging) == (0, 12)
    purging.free(purging.half._requests["still"].request)
    purging.half.purge()
    finish_purge(purging, worker)
    again("after a reset")
    assert stored_and_failed(worker, purging) == (4, 12)
    worker.close()


def test_after_a_step_that_no_worker_began_nothing_is_saved_before_a_reset(
    purging: Engine, mooncake: LocalMooncake, described: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The runner raises before it binds; vLLM counts the step's tokens, and the next chunk attends
    to what nobody has written."""
    tokens = [71, *TOKENS[1:]]
    worker = make_worker(mooncake, configuration(), described)
    idle(worker, purging.step())
    request = purging.request("lost", tokens)
    purging.allocate(request, len(tokens))
    purging.step(lost=BLOCK - 1)
    request.num_computed_tokens = BLOCK - 1
    metadata = purging.step(lost=len(tokens) - BLOCK + 1)
    assert len(saved_blocks(metadata.plan)) == 4
    with caplog.at_level(logging.ERROR, logger="vllm.kvprism"):
        worker.bind(metadata)
    (error,) = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert error.startswith("kvprism: a step has failed, and vLLM's own cache has its blocks")
    worker.submit()
    assert stored_and_failed(worker, purging) == (0, 4)
    purging.free(request)
    purging.half.purge()
    finish_purge(purging, worker)
    request = purging.request("after", tokens)
    purging.allocate(request, len(tokens))
    worker.bind(purging.step(after=len(tokens)))
    worker.submit()
    assert stored_and_failed(worker, purging) == (4, 4)
    worker.close()


@pytest.mark.parametrize("another", [False, True])
def test_a_reset_after_a_step_that_no_worker_began_counts(
    purging: Engine, mooncake: LocalMooncake, described: Any, another: bool
) -> None:
    """Also where the worker hears of both with the next step, unless that one's forerunner was
    scheduled behind the reset and is missing too."""
    tokens = [72 + another, *TOKENS[1:]]
    worker = make_worker(mooncake, configuration(), described)
    idle(worker, purging.step())
    request = purging.request("lost", tokens)
    purging.allocate(request, len(tokens))
    purging.step(lost=BLOCK - 1)
    purging.free(request)
    purging.half.purge()
    if another:
        purging.step()
    finish_purge(purging, worker)
    request = purging.request("after", tokens)
    purging.allocate(request, len(tokens))
    metadata = purging.step(after=len(tokens))
    assert len(saved_blocks(metadata.plan)) == 4
    worker.bind(metadata)
    worker.submit()
    assert stored_and_failed(worker, purging) == ((0, 4) if another else (4, 0))
    purging.free(request)
    purging.half.purge()
    finish_purge(purging, worker)
    worker.close()


def test_a_step_that_never_ends_is_not_saved_with_the_next_one(
    engine: Engine, mooncake: LocalMooncake, described: Any
) -> None:
    worker, metadata = failing_worker(engine, mooncake, described, "never ends")
    worker.bind(metadata)
    worker.bind(StepMetadata())
    worker.submit()
    assert stored_and_failed(worker, engine) == (0, 4)
    worker.close()


@pytest.mark.parametrize(("inner", "stored"), [(False, (0, 4)), (True, (4, 0))])
def test_a_step_whose_drafter_fails_is_not_saved_with_the_next_one(
    engine: Engine,
    mooncake: LocalMooncake,
    described: Any,
    inner: bool,
    stored: tuple[int, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM asks for its results before it samples and drafts, and ends it afterwards, but in inner
    pipeline stages, which do neither, never."""
    worker, metadata = failing_worker(engine, mooncake, described, f"drafts {inner}")
    worker.close()
    worker = make_worker(mooncake, configuration(), described, inner=inner)
    worker.bind(metadata)
    worker.take_results()
    worker.take_reports()
    with caplog.at_level(logging.ERROR, logger="vllm.kvprism"):
        worker.bind(StepMetadata())
    worker.submit()
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == (not inner)
    assert all("a step has failed, and vLLM's own cache has its blocks" in each for each in errors)
    assert stored_and_failed(worker, engine) == stored
    worker.close()


def test_a_step_is_saved_while_its_caller_handles_an_exception(
    engine: Engine, mooncake: LocalMooncake, described: Any
) -> None:
    """An application may go on after an error of its own."""
    worker, metadata = failing_worker(engine, mooncake, described, "handled")
    try:
        raise KeyError("of the application")
    except KeyError:
        worker.bind(metadata)
        worker.submit()
        worker.take_results()
        worker.clear()
    assert stored_and_failed(worker, engine) == (4, 0)
    worker.close()


class Interrupted:
    """A StoreWorker in whose first close a signal arrives; what that says is lost."""

    def __init__(self, worker: Any, unquiet: int) -> None:
        self._worker = worker
        self._unquiet = unquiet
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def close(self, timeout_seconds: float) -> int:
        self._worker.close(timeout_seconds)
        if not self._closed:
            self._closed = True
            raise KeyboardInterrupt
        return self._unquiet


@pytest.mark.parametrize("unquiet", [0, 1])
def test_after_a_close_that_was_interrupted_memory_is_not_released_unseen(
    engine: Engine, mooncake: LocalMooncake, described: Any, unquiet: int
) -> None:
    worker, _ = failing_worker(engine, mooncake, described, f"interrupted {unquiet}")
    worker._worker = Interrupted(worker._worker, unquiet)
    with pytest.raises(KeyboardInterrupt):
        worker.close()
    assert worker.released == (unquiet == 0), "it is asked anew"
    assert worker.close() == unquiet
    worker._worker._unquiet = 0  # the call has returned
    assert worker.released
    assert worker.close() == 0
