"""What a KV connector costs vLLM's scheduler: the built-in store connector and kvprism in one run.

The real Scheduler of vLLM serves requests without a model: every request gets its tokens at once.
Only the connector's methods are counted (processor time of the scheduler's thread, and time on the
clock), and the bytes and the pickling of its metadata. Every prompt is new, and a scheduler has
served as many requests before. The built-in connector's lookup process is replaced by one that
answers "nothing" at once and searches nothing; kvprism asks a real Mooncake, in another thread,
and its worker saves in memory. A third arm is the built-in connector with the two lists
that it scans for every request replaced by what finds a member at once.

Prints a table and, as the last line, JSON.
"""

from __future__ import annotations

import argparse
import ast
import gc
import inspect
import json
import multiprocessing
import os
import pickle
import statistics
import sys
import tempfile
import textwrap
import time
import types
from pathlib import Path
from typing import Any, ClassVar

# Before vLLM is imported: prompts longer than the tiny model allows, and no hub.
os.environ.update(
    VLLM_ALLOW_LONG_MAX_MODEL_LEN="1",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "vllm"))

BLOCK = 32
LAYERS = 2
_TIMED = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
)


class IndexedList(list):  # type: ignore[type-arg]
    """A list whose ``in`` does not scan."""

    def __contains__(self, value: object) -> bool:
        if not hasattr(self, "_index"):
            self._index = set(self)
        return value in self._index


class Meter:
    """Wraps a connector's methods; adds up the time spent inside."""

    def __init__(self, connector: Any) -> None:
        self.seconds = self.wall = 0.0
        for name in _TIMED:
            setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin, wall = time.thread_time(), time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - begin
                self.wall += time.perf_counter() - wall

        return call

    def take(self) -> dict[str, float]:
        taken = {"step": self.seconds, "wall": self.wall}
        self.seconds = self.wall = 0.0
        return taken


def vllm_config(
    model: Path, connector: dict[str, Any], requests: int, blocks: int, chunk: int
) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=(blocks + 64) * BLOCK,
        max_num_seqs=requests,
        max_num_batched_tokens=requests * chunk * BLOCK,
        long_prefill_token_threshold=chunk * BLOCK,
        enable_prefix_caching=True,
        kv_transfer_config=connector,
    ).create_engine_config()


def cache_config(blocks: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    page = spec.page_size_bytes
    tensor = KVCacheTensor(
        size=page * blocks * LAYERS, layers=names, layer_stride=page * blocks, block_stride=page
    )
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        kv_cache_layout="LBHNC",
        hash_block_size=BLOCK,
        cache_hit_alignment_tokens=BLOCK,
    )


def answer_nothing(path: str) -> None:
    """The lookup process of the built-in connector, if it never had to search."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.bind(path)
        while True:
            socket.recv_multipart(copy=False)
            socket.send(b"\0\0\0\0")


class BuiltIn:
    """The connector that comes with vLLM."""

    name = "built-in"
    connector: ClassVar[dict[str, Any]] = {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": "kv_both",
    }

    def __init__(self, scheduler: Any, config: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
            MooncakeStoreWorkerMetadata,
        )
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
            get_zmq_rpc_path_lookup,
        )

        path = get_zmq_rpc_path_lookup(scheduler.vllm_config)
        self._server = multiprocessing.get_context("spawn").Process(
            target=answer_nothing, args=(path,), daemon=True
        )
        self._server.start()
        self._report = MooncakeStoreWorkerMetadata
        self._client = scheduler.connector.connector_scheduler.client

    def prepare(self, output: Any) -> None:
        """Before the connector sees a step's plan."""

    def reply(self, metadata: Any) -> Any:
        """What workers would tell about the step's jobs."""
        jobs = [meta.store_job_id for meta in metadata.requests if meta.store_job_id is not None]
        return self._report(dict.fromkeys(jobs, 1))

    def close(self) -> None:
        self._server.terminate()
        self._server.join(10)
        self._client.close()


def without_scan(method: Any) -> Any:
    """The method with its list of the new requests' ids made a set, in which nothing scans."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    lists = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.ListComp)
        and ast.unparse(node.targets[0]) == "request_ids"
    ]
    if len(lists) != 1:
        raise RuntimeError("the built-in connector is not the one that this arm was written for")
    found = lists[0].value
    assert isinstance(found, ast.ListComp)
    lists[0].value = ast.SetComp(elt=found.elt, generators=found.generators)
    made: dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(tree), inspect.getfile(method), "exec")
    exec(code, dict(method.__globals__), made)
    return made[method.__name__]


class Patched(BuiltIn):
    """The same, without the scans that grow with the square of the requests."""

    name = "built-in, set for list"

    def __init__(self, scheduler: Any, config: Any) -> None:
        super().__init__(scheduler, config)
        half = scheduler.connector.connector_scheduler
        changed = without_scan(type(half).build_connector_meta)
        half.build_connector_meta = types.MethodType(changed, half)

    def prepare(self, output: Any) -> None:
        cached = output.scheduled_cached_reqs
        cached.req_ids = IndexedList(cached.req_ids)


class KVPrism:
    """This project's connector, with a worker behind it."""

    name = "kvprism"
    connector: ClassVar[dict[str, Any]] = {
        "kv_connector": "KVPrismConnector",
        "kv_connector_module_path": "kvprism.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lookup_timeout_seconds": 30.0},
    }

    def __init__(self, scheduler: Any, config: Any) -> None:
        import kvprism
        import numpy as np
        from kvprism.vllm.metadata import ReportMetadata

        described = scheduler.connector._describe()
        store = kvprism.memory_store(kvprism.MemoryPool())
        self._memory = np.zeros(config.kv_cache_tensors[0].size, dtype=np.uint8)
        tensor = config.kv_cache_tensors[0]
        self._worker = kvprism.StoreWorker(
            described.schema,
            kvprism.SegmentMap(
                described.projection,
                [
                    kvprism.CacheTensor(
                        self._memory,
                        layers=list(tensor.layers),
                        layer_stride=tensor.layer_stride,
                        block_stride=tensor.block_stride,
                    )
                ],
            ),
            store,
        )
        self._host = kvprism.ReadyToken.host
        self._report = ReportMetadata

    def prepare(self, output: Any) -> None:
        """Before the connector sees a step's plan."""

    def reply(self, metadata: Any) -> Any:
        """What workers tell about the step's jobs."""
        if metadata.plan:
            self._worker.submit(metadata.plan, self._host())
        report = b""
        while self._worker.counters()["jobs_alive"]:
            report += self._worker.wait(10.0) or b""
        report += self._worker.poll() or b""
        return self._report(report) if report else None

    def close(self) -> None:
        self._worker.close()


def make_scheduler(arm: Any, model: Path, requests: int, blocks: int, chunk: int) -> Any:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    config = vllm_config(model, dict(arm.connector), requests, blocks, chunk)
    kv = cache_config(2 * requests * (blocks + 64) + 1)
    config.cache_config.num_gpu_blocks = kv.num_blocks
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=False,
    )
    return scheduler, kv


def add_requests(scheduler: Any, requests: int, blocks: int, seed: int) -> list[str]:
    """Their ids."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    ids = [f"request-{seed}-{number}" for number in range(requests)]
    for number, name in enumerate(ids):
        prompt = [(seed + number * 7919 + position) % 31_000 for position in range(blocks * BLOCK)]
        parameters = SamplingParams(max_tokens=10_000, ignore_eos=True)
        parameters.update_from_generation_config({}, eos_token_id=2)
        scheduler.add_request(Request(name, prompt, parameters, None, block_hasher=hasher))
    return ids


def step(
    scheduler: Any, arm: Any, meter: Meter, prompt_tokens: int
) -> tuple[str, dict[str, float]]:
    """One step: its phase and its figures. The phase is empty where nothing was scheduled."""
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    output = scheduler.schedule()
    if not output.num_scheduled_tokens:
        # Lookups are under way; what they cost is counted with the step that follows. An engine
        # without other work would ask again and again.
        time.sleep(0.05)
        scheduler.update_from_output(output, ModelRunnerOutput(req_ids=[], req_id_to_index={}))
        return "", {}
    ids = list(output.num_scheduled_tokens)
    begin = time.thread_time()
    wire = pickle.dumps(output.kv_connector_metadata, protocol=pickle.HIGHEST_PROTOCOL)
    middle = time.thread_time()
    received = pickle.loads(wire)
    pickled, unpickled = middle - begin, time.thread_time() - middle
    answer = arm.reply(received)
    done = [scheduler.requests[i].num_computed_tokens >= prompt_tokens for i in ids]
    longest = max(output.num_scheduled_tokens.values())
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={i: at for at, i in enumerate(ids)},
            sampled_token_ids=[[7] if ready else [] for ready in done],
            kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=answer),
        ),
    )
    row = {**meter.take(), "pickle": pickled, "unpickle": unpickled, "bytes": float(len(wire))}
    return "new" if output.scheduled_new_reqs else "chunk" if longest > 1 else "decode", row


def run(
    arm_type: Any, model: Path, requests: int, blocks: int, chunk: int, decode: int
) -> dict[str, Any]:
    """One arm: the figures of its steps, in a scheduler that has served as many requests before."""
    from vllm.v1.request import RequestStatus

    scheduler, kv = make_scheduler(arm_type, model, requests, blocks, chunk)
    arm = arm_type(scheduler, kv)
    original = scheduler._build_kv_connector_meta

    def build(connector: Any, output: Any) -> Any:
        arm.prepare(output)
        return original(connector, output)

    scheduler._build_kv_connector_meta = build
    meter = Meter(scheduler.connector)
    before = add_requests(scheduler, requests, blocks, 1)
    while any(scheduler.requests[name].num_computed_tokens == 0 for name in before):
        step(scheduler, arm, meter, blocks * BLOCK)
    scheduler.finish_requests(before, RequestStatus.FINISHED_ABORTED)
    step(scheduler, arm, meter, blocks * BLOCK)
    meter.take()

    add_requests(scheduler, requests, blocks, 2)
    gc.collect()
    gc.freeze()
    steps: dict[str, list[dict[str, float]]] = {"new": [], "chunk": [], "decode": []}
    while len(steps["decode"]) < decode:
        phase, row = step(scheduler, arm, meter, blocks * BLOCK)
        if phase:
            steps[phase].append(row)
    # One arm takes all new requests at once, another in several steps.
    new = steps["new"]
    steps["new"] = [{name: sum(row[name] for row in new) for name in new[0]}]
    arm.close()
    gc.unfreeze()
    return {phase: summary(rows) for phase, rows in steps.items()}


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Medians, and what the last chunk costs: a cost that grows with the context shows there."""
    out = {"steps": float(len(rows))}
    for name in ("step", "wall", "pickle", "unpickle", "bytes"):
        values = [row[name] for row in rows]
        out[name] = statistics.median(values)
        out[name + "_last"] = values[-1]
        out[name + "_largest"] = max(values)
    return out


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2048, help="of 32 tokens, in each prompt")
    parser.add_argument("--chunk", type=int, default=64, help="blocks of a request in one step")
    parser.add_argument("--decode", type=int, default=200, help="decode steps")
    args = parser.parse_args()

    import models
    import vllm.v1.worker.cpu.shm  # noqa: F401  # placeholders for torch.cuda.Event
    from kvprism.local_mooncake import LocalMooncake

    results = {}
    with tempfile.TemporaryDirectory() as folder, LocalMooncake(storage_bytes=16 << 20) as mooncake:
        KVPrism.connector["kv_connector_extra_config"]["master_server_address"] = mooncake.master
        model = models.build("llama", Path(folder))
        for arm in (BuiltIn, Patched, KVPrism):
            results[arm.name] = run(arm, model, args.requests, args.blocks, args.chunk, args.decode)
    ours = results["kvprism"]
    print(f"{'':32}{'cpu ms':>9}{'last':>9}{'clock':>9}{'pickle':>9}{'unpickle':>9}{'bytes':>12}")
    for phase in ("new", "chunk", "decode"):
        for name, result in results.items():
            row = result[phase]
            print(
                f"{phase + ', ' + name:32}{row['step'] * 1e3:>9.3f}{row['step_last'] * 1e3:>9.3f}"
                f"{row['wall'] * 1e3:>9.3f}{row['pickle'] * 1e3:>9.3f}"
                f"{row['unpickle'] * 1e3:>9.3f}{row['bytes']:>12,.0f}"
            )
    ratios = {
        f"{name}: {phase}": round(result[phase]["step"] / ours[phase]["step"], 1)
        for name, result in results.items()
        if name != "kvprism"
        for phase in ("new", "chunk", "decode")
    }
    print("time of the other over ours:", ratios)
    print(json.dumps({"arguments": vars(args), "results": results, "ratios": ratios}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
