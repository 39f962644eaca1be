"""Generated requests through vLLM's own scheduler with the built-in connector and with ours.

Nothing is computed: every request gets its tokens at once. Both connectors run whole, with their
workers; the built-in's Mooncake is replaced by a dictionary, and ours stores in memory, so that
both move at the same pace. Requests come and are aborted while they wait, load, are computed in
chunks or generate, are preempted, and share beginnings; the engine's own cache is emptied now and
then. What is scheduled, looked up, loaded and saved must be the same, name by name. What differs on
purpose is in docs/differences.md.
"""

from __future__ import annotations

import functools
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import kvprism
import pytest
import test_layouts
from kvprism.vllm import scheduler_side, worker_side
from lookup_pace import PacedLookups, join, pace

BLOCK = 32
ROUNDS = 120
BOUND = 60.0  # seconds for what is moved in a step
LAYOUT = "LBHNC"
EXTRA = {"load_async": True, "lookup_async": True}


class Pool:
    """What the built-in connector's worker asks of Mooncake's client."""

    def __init__(self) -> None:
        self.objects: dict[str, int] = {}
        self.loaded: list[list[int]] = []  # where each object's pieces went

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.objects) for key in keys]

    def batch_put_from_multi_buffers(
        self, keys: list[str], addresses: Any, sizes: list[list[int]], replicas: Any
    ) -> list[int]:
        self.objects.update((key, sum(each)) for key, each in zip(keys, sizes, strict=True))
        return [0] * len(keys)

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], *_: Any
    ) -> list[int]:
        self.loaded += addresses
        return [sum(each) for each in sizes]

    def register_buffer(self, *_: Any) -> int:
        return 0

    def close(self) -> None:
        """Nothing is held."""


class Arm:
    """vLLM's scheduler with a connector, and the connector of a worker."""

    def __init__(self, connector: dict[str, Any], config: Any, budget: int, **engine: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        made, self.memory = config
        self.vllm_config = EngineArgs(
            model=str(conftest.model("llama")),
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=1024,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            enable_prefix_caching=True,
            scheduler_reserve_full_isl=False,  # or nobody is ever preempted while it is computed
            kv_transfer_config=connector,
            **engine,
        ).create_engine_config()
        self.vllm_config.cache_config.num_gpu_blocks = made.num_blocks
        step, unit = resolve_kv_cache_block_sizes(made, self.vllm_config)
        made.hash_block_size, made.cache_hit_alignment_tokens = unit, step
        self.scheduler = Scheduler(
            vllm_config=self.vllm_config,
            kv_cache_config=made,
            structured_output_manager=StructuredOutputManager(self.vllm_config),
            block_size=step,
            hash_block_size=unit,
            log_stats=False,
        )
        self.unit, self.step_tokens = unit, step
        self.connector = self.scheduler.connector
        self.worker = KVConnectorFactory.create_connector(
            self.vllm_config, KVConnectorRole.WORKER, made
        )
        self.worker.register_kv_caches(test_layouts.views(LAYOUT, made, self.memory, None))
        self._bytes_of_layer = made.kv_cache_tensors[0].layer_stride
        self._bytes_of_block = made.kv_cache_tensors[0].block_stride
        self.trace: list[Any] = []
        self._look_up = self.connector.get_num_new_matched_tokens
        self.connector.get_num_new_matched_tokens = self._lookup

    def _lookup(self, request: Any, computed: int) -> Any:
        found = self._look_up(request, computed)
        self.trace.append(("found", request.request_id, computed, found[0]))
        return found

    def add(self, name: str, prompt: list[int], answer: int, priority: int = 0) -> None:
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        parameters = SamplingParams(max_tokens=answer, ignore_eos=True)
        parameters.update_from_generation_config({}, eos_token_id=2)
        hasher = get_request_block_hasher(self.unit, sha256)
        request = Request(name, prompt, parameters, None, block_hasher=hasher, priority=priority)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        if output.preempted_req_ids:
            self.trace.append(("preempted", sorted(output.preempted_req_ids)))
        self.trace.append(("scheduled", sorted(output.num_scheduled_tokens.items())))
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.work(output.finished_req_ids)
        # Allocators may differ in which block is free first, and not in what it is for.
        places = self.places()
        loaded = sorted(places[block] for block in self.loaded_blocks(output.kv_connector_metadata))
        self.trace.append(("loaded", loaded))
        told = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        # A token is a function of its request and place.
        sampled = [
            [len(each.all_token_ids) * 7 % 500 + 4]
            if each.num_computed_tokens >= each.num_tokens
            else []
            for each in requests
        ]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=KVConnectorOutput(
                    finished_recving=results or None, kv_connector_worker_meta=told
                ),
            ),
        )

    def work(self, finished: set[str]) -> set[str]:
        """Ends all transfers and tells which loads are over."""
        raise NotImplementedError

    def loaded_blocks(self, metadata: Any) -> list[int]:
        """Destinations of the loads of the step."""
        raise NotImplementedError

    def places(self) -> dict[int, tuple[str, int, int]]:
        """Of each block: the first request that has it, the group and the place in its table."""
        found: dict[int, tuple[str, int, int]] = {}
        for name in sorted(self.scheduler.requests):
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            for group, table in enumerate(tables):
                for at, block in enumerate(table):
                    found.setdefault(block, (name, group, at))
        return found

    def objects(self) -> dict[str, int]:
        raise NotImplementedError

    def busy(self) -> bool:
        return self.scheduler.has_unfinished_requests() or self.connector.has_pending_push_work()


class Theirs(Arm):
    """The connector that comes with vLLM."""

    def __init__(self, config: Any, budget: int) -> None:
        transfer = {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": EXTRA,
        }
        super().__init__(transfer, config, budget)
        self._inside = self.worker.connector_worker
        self._lookups = PacedLookups(
            lambda _, tokens, hashes: self._inside.lookup(tokens, list(hashes)),
            self.step_tokens,
            late=True,
        )
        pace(self.connector.connector_scheduler, self._lookups)

    def _lookup(self, request: Any, computed: int) -> Any:
        self._lookups.computed = computed
        return super()._lookup(request, computed)

    def work(self, finished: set[str]) -> set[str]:
        for queue in (self._inside.kv_send_thread.request_queue, self._inside.recv_request_queue):
            join(queue, BOUND)
        results = self.worker.get_transfer_results(finished)
        assert not results.failed_recving
        return results.finished_recving or set()

    def objects(self) -> dict[str, int]:
        return dict(self._inside.store.objects)

    def loaded_blocks(self, metadata: Any) -> list[int]:
        pieces, self._inside.store.loaded = self._inside.store.loaded, []
        base = self.memory.data_ptr()
        return [
            (addresses[0] - base) % self._bytes_of_layer // self._bytes_of_block
            for addresses in pieces
        ]


class Ours(Arm):
    """This project's connector."""

    options: Mapping[str, Any] = {}

    def __init__(self, config: Any, budget: int, pool: kvprism.MemoryPool, **engine: Any) -> None:
        transfer = {
            "kv_connector": "KVPrismConnector",
            "kv_connector_module_path": "kvprism.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "master_server_address": "nobody:1",
                "key_schema": "vllm",
                "max_held_percent": 100,
                **self.options,
            },
        }
        super().__init__(transfer, config, budget, **engine)
        self._pool = pool

    def work(self, finished: set[str]) -> set[str]:
        done: set[str] = set()
        end = time.monotonic() + BOUND
        while True:
            assert time.monotonic() < end
            alive = self.worker._worker.counters()["jobs_alive"]
            results = self.worker.get_transfer_results(finished)
            assert not results.failed_recving
            done |= results.finished_recving or set()
            if not alive:
                return done

    def objects(self) -> dict[str, int]:
        return dict(self._pool.objects())

    def loaded_blocks(self, metadata: Any) -> list[int]:
        if not metadata.loads:
            return []
        plan = kvprism.StepPlan.decode(metadata.plan)
        return [block for job, _ in metadata.loads for block in plan.blocks(job)]

    def close(self) -> None:
        self.worker.shutdown()
        self.connector.shutdown()


def layers(kind: str) -> dict[str, Any]:
    import torch
    from vllm.v1.kv_cache_interface import (
        CircularBufferSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    shape = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
    full = FullAttentionSpec(**shape)
    window = SlidingWindowSpec(**shape, sliding_window=80)
    state = MambaSpec(
        block_size=BLOCK,
        shapes=((30, 7), (64,)),
        dtypes=(torch.float32, torch.float32),
        mamba_cache_mode="align",
        page_size_padded=full.page_size_bytes,
    )
    # A row for each of 8 positions: as long as the pages of attention.
    ring = CircularBufferSpec(
        block_size=8, num_kv_heads=1, head_size=256, head_size_v=0, dtype=torch.float32
    )
    return {
        "full": {"0.attn": full, "1.attn": full},
        "windows": {"0.attn": full, "1.attn": window, "2.attn": full, "3.attn": window},
        "states": {"0.attn": full, "1.state": state, "2.attn": full, "3.state": state},
        "ring": {"0.attn": full, "0.ring": ring, "1.attn": full, "1.ring": ring},
    }[kind]


@pytest.fixture
def arms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    import mooncake.store
    import vllm.v1.worker.cpu.shm  # noqa: F401  # placeholders for torch.cuda.Event
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import scheduler, worker

    file = tmp_path / "mooncake.json"
    file.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "mode": "standalone-store",
                "master_server_address": "nobody:1",
                "protocol": "tcp",
                "global_segment_size": 0,
            }
        )
    )
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    monkeypatch.setenv("VLLM_MOONCAKE_LOAD_RECV_THREADS", "1")
    monkeypatch.setattr(mooncake.store, "MooncakeDistributedStore", Pool)
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    # Little more than one request needs.
    blocks = {"full": 12, "windows": 20, "states": 20, "ring": 20}[request.param]
    monkeypatch.setattr(test_layouts, "BLOCKS", blocks)
    monkeypatch.setattr(scheduler, "LookupKeyClient", lambda _: None)
    monkeypatch.setattr(worker, "LookupKeyServer", lambda *_: None)
    monkeypatch.setattr(worker, "setup_mooncake_store", lambda *_: None)
    monkeypatch.setattr(worker, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(worker, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(worker, "get_pcp_group", lambda: alone)
    monkeypatch.setattr(worker, "get_dcp_group", lambda: alone)
    checked = functools.partial(kvprism.StoreScheduler, checked=True)  # refuses calls out of order
    monkeypatch.setattr(scheduler_side, "StoreScheduler", checked)
    pool = kvprism.MemoryPool()
    for side in (scheduler_side, worker_side):
        monkeypatch.setattr(side, "open_store", lambda *_, **__: kvprism.memory_store(pool))
    specs = layers(request.param)
    theirs = Theirs(test_layouts.engine(LAYOUT, specs), 96)
    ours = Ours(test_layouts.engine(LAYOUT, specs), 96, pool)
    yield theirs, ours
    ours.close()


def prompt_of(
    draw: random.Random, known: list[list[int]], shared: int = 6, more: int = 4
) -> list[int]:
    """Less than `shared` blocks of an earlier prompt or none, and less than `more` others.

    The last block has room for the answer (D14).
    """
    begin = (
        draw.choice(known)[: draw.randrange(0, shared) * BLOCK]
        if known and draw.random() < 0.7
        else []
    )
    length = (len(begin) // BLOCK + draw.randrange(0, more)) * BLOCK + draw.randrange(1, 8)
    return begin + [draw.randrange(4, 500) for _ in range(length - len(begin))]


def first_difference(ours: list[Any], theirs: list[Any]) -> Any:
    """With what came before it."""
    for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return {"before": ours[max(0, at - 12) : at], "ours": one, "theirs": other}
    return None if len(ours) == len(theirs) else (len(ours), len(theirs))


@pytest.mark.parametrize("arms", ["full", "windows", "states", "ring"], indirect=True)
def test_the_same_is_scheduled_found_and_saved(arms: Any) -> None:
    draw = random.Random(11)
    known: list[list[int]] = []
    for round_number in range(ROUNDS):
        asked = {
            f"{round_number}-{at}": prompt_of(draw, known) for at in range(draw.randrange(1, 8))
        }
        known += asked.values()
        answers = {name: draw.randrange(1, 20) for name in asked}
        aborts = {name: draw.randrange(1, 20) for name in asked if draw.random() < 0.2}
        for arm in arms:
            for name, prompt in asked.items():
                arm.add(name, list(prompt), answers[name])
            steps = 0
            while arm.busy():
                steps += 1
                for name, at in aborts.items():
                    if at == steps:
                        arm.abort(name)
                arm.step()
                assert steps < 1000, (type(arm), arm.trace[-8:])
        theirs, ours = arms
        assert first_difference(ours.trace, theirs.trace) is None
        assert ours.objects() == theirs.objects(), round_number
        if draw.random() < 0.6:
            assert all(arm.scheduler.reset_prefix_cache() for arm in arms)
    words = [entry[0] for entry in ours.trace]
    assert sum(entry[3] or 0 for entry in ours.trace if entry[0] == "found") > 10_000
    assert words.count("preempted") > 5
    assert sum(len(entry[1]) for entry in ours.trace if entry[0] == "loaded") > 300
