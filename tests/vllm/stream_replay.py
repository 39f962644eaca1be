"""Gives our connector the calls that stream_record.py has written down, and compares what it does.

Every object has bytes of its own. They are put where the built-in's worker has read them, so that
what is stored under a name, and what a load leaves in the cache, says whether the right block went
under the right name.
"""

from __future__ import annotations

import functools
import random
import time
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, TypeVar

import kvprism
import torch
from stream_record import (
    Allocated,
    Came,
    Ended,
    Engine,
    Finished,
    Lookup,
    Memory,
    Moved,
    State,
    Step,
    Tail,
    View,
)
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

BOUND = 60.0  # seconds for what is moved in a step, or asked
OURS = {
    "kv_connector": "KVPrismConnector",
    "kv_connector_module_path": "kvprism.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "master_server_address": "nobody:1",
        "key_schema": "vllm",
        "max_held_percent": 100,
        "lookup_timeout_seconds": BOUND,
        "load_timeout_seconds": 2 * BOUND,
    },
}

Piece = tuple[int, int, int]
Record = TypeVar("Record")


class CountedBlocks:
    """In place of vLLM's block pool: counts references, and finds each block under every name."""

    def __init__(self, number: int, unit: int) -> None:
        self.hash_block_size = unit
        self.cached_block_hash_to_block = SimpleNamespace(contain=lambda key, block: True)
        self.blocks = [SimpleNamespace(block_id=block) for block in range(number)]
        self.references: Counter[int] = Counter()

    def touch(self, blocks: Iterable[Any]) -> None:
        self.references.update(block.block_id for block in blocks)

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            self.references[block.block_id] -= 1
            assert self.references[block.block_id] >= 0, f"block {block.block_id} was freed twice"


@functools.cache
def bytes_of(name: str, length: int) -> bytes:
    """An object's own."""
    return random.Random(name).randbytes(length)


class Bytes:
    """The cache's memory."""

    def __init__(self, memory: Memory) -> None:
        self._allocations = [torch.zeros(size, dtype=torch.uint8) for size in memory.allocations]
        self.layers = {
            name: [self._tensor(view) for view in views]
            if isinstance(views, list)
            else self._tensor(views)
            for name, views in memory.layers.items()
        }

    def _tensor(self, view: View) -> Any:
        whole = self._allocations[view.allocation].view(view.dtype)
        return whole.as_strided(view.shape, view.stride, view.offset)

    def address(self, piece: Piece) -> int:
        allocation, offset, _ = piece
        return int(self._allocations[allocation].data_ptr()) + offset

    def piece(self, address: int, size: int) -> Piece:
        for number, allocation in enumerate(self._allocations):
            offset = address - allocation.data_ptr()
            if offset >= 0 and offset + size <= len(allocation):
                return number, offset, size
        raise ValueError(f"{size} bytes at {address:#x} are not in the cache")

    def write(self, pieces: list[Piece], content: bytes) -> None:
        at = 0
        for allocation, offset, size in pieces:
            part = bytearray(content[at : at + size])
            self._allocations[allocation][offset : offset + size] = torch.frombuffer(
                part, dtype=torch.uint8
            )
            at += size
        assert at == len(content)

    def read(self, pieces: list[Piece]) -> bytes:
        return b"".join(
            self._allocations[allocation][offset : offset + size].numpy().tobytes()
            for allocation, offset, size in pieces
        )


def objects(moved: Iterable[Moved]) -> dict[str, list[Piece]]:
    """Names and pieces, of calls that have all succeeded."""
    found = {}
    for each in moved:
        assert all(status >= 0 for status in each.statuses), each
        found.update(zip(each.names, each.pieces, strict=True))
    return found


def size_of(pieces: list[Piece]) -> int:
    return sum(size for _, _, size in pieces)


class Replay:
    """Our connector, under a recorded engine."""

    def __init__(
        self, stream: list[Any], pool: kvprism.MemoryPool, windows: frozenset[str] = frozenset()
    ) -> None:
        """Of the groups `windows`, by their names in keys, ours may keep more (D16)."""
        self._stream, self._pool, self._windows = stream, pool, windows
        (engine,) = (each for each in stream if isinstance(each, Engine))
        (memory,) = (each for each in stream if isinstance(each, Memory))
        self._bytes = Bytes(memory)
        cache = engine.kv_cache_config
        engine.vllm_config.kv_transfer_config = KVTransferConfig(**OURS)
        self._scheduler, self._worker = (
            KVConnectorFactory.create_connector(engine.vllm_config, role, cache)
            for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
        )
        self._worker.register_kv_caches(self._bytes.layers)
        self._blocks = CountedBlocks(cache.num_blocks, cache.hash_block_size)
        self._scheduler.bind_gpu_block_pool(self._blocks)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(cache.hash_block_size, sha256)
        self._unit = cache.hash_block_size
        self._map = self._worker._worker._map
        self._block_at = self._block_addresses(cache.num_blocks)
        names = (name for end in stream if isinstance(end, Ended) for name in objects(end.puts))
        self._prefix = next(names).rpartition("@group:")[0]
        self._requests: dict[str, Request] = {}
        self._at = 0  # number of the record
        self._planned: dict[str, list[int]] = {}  # loads of the step so far
        self._loading: set[str] = set()  # requests whose loads the scheduler has not been told of
        self._reports: list[Any] = []  # for the scheduler, at the end of the step
        self._late_reports: list[Any] = []  # at the end of the next: loads take a step more
        self._kept: set[str] = set()  # windows that ours has stored and the built-in has not
        self._declined: set[str] = set()  # requests for which ours offers more because of that
        self.stored: dict[str, int] = {}  # what the built-in's worker has put
        self.counts: Counter[str] = Counter()

    def _block_addresses(self, blocks: int) -> dict[int, int]:
        """Where each block of the pool begins: every group has its bytes in the same place."""
        return {
            self._map.segments(kvprism.GroupId(int(group)), block)[0][0]: block
            for group in self._map.projection.store_group_ids
            for block in range(1, blocks)
        }

    def close(self) -> None:
        self._worker.shutdown()
        self._scheduler.shutdown()

    def run(self) -> None:
        """All records, then what is still under way."""
        handlers = {
            Came: self._came,
            Lookup: self._lookup,
            Allocated: self._allocated,
            Step: self._step,
            Tail: self._tail,
            Finished: self._finished,
            Ended: self._ended,
        }
        for at, record in enumerate(self._stream):
            self._at = at
            if type(record) in handlers:
                handlers[type(record)](record)
        end = time.monotonic() + BOUND
        while self._scheduler.has_pending_push_work():
            assert time.monotonic() < end, "work stays pending"
            self._idle_step()
        left = {block: count for block, count in self._blocks.references.items() if count}
        assert not left, f"references that nobody gives back: {left}"
        self._compare_pool()

    def _same(self, ours: Any, theirs: Any, what: str) -> None:
        assert ours == theirs, f"record {self._at}: {what}: ours {ours}, recorded {theirs}"

    def _same_names(self, ours: set[str], theirs: set[str], what: str) -> None:
        more, less = sorted(ours - theirs), sorted(theirs - ours)
        assert [more, less] == [[], []], (
            f"record {self._at}: {what}: ours alone {more}, recorded alone {less}"
        )

    def _request(self, state: State) -> Request:
        """As it was at that moment."""
        request = self._requests[state.name]
        if state.tokens:
            request.append_output_token_ids(state.tokens)
        request.num_computed_tokens, request.status = state.computed, state.status
        return request

    def _next(self, kind: type[Record]) -> Record:
        """The step in which this record is, or its end, whose transfers are known beforehand."""
        return next(each for each in self._stream[self._at :] if isinstance(each, kind))

    # The records.

    def _came(self, record: Came) -> None:
        parameters = SamplingParams(max_tokens=1, ignore_eos=True)
        request = Request(record.name, record.prompt, parameters, None, block_hasher=self._hasher)
        self._same(list(request.block_hashes), record.hashes, f"hashes of {record.name}")
        self._requests[record.name] = request
        self._scheduler.on_new_request(request)

    def _lookup(self, record: Lookup) -> None:
        name = record.state.name
        request = self._request(record.state)
        found = self._ask(request, record.computed)
        self.counts["lookups"] += 1
        self.counts["found"] += record.found
        self._declined.discard(name)
        if self._kept and found > record.found:
            self._declined.add(name)
            self.counts["longer"] += 1
            return
        self._same(found, record.found, f"hit of {name} behind {record.computed} tokens")

    def _ask(self, request: Request, computed: int) -> int:
        """The answer, if need be after steps that schedule nothing."""
        end = time.monotonic() + BOUND
        while True:
            found, later = self._scheduler.get_num_new_matched_tokens(request, computed)
            if found is not None:
                assert later == (found > 0)
                return int(found)
            assert time.monotonic() < end, f"no answer for {request.request_id}"
            self._idle_step()

    def _idle_step(self) -> None:
        output = SchedulerOutput.make_empty()
        output.kv_connector_block_state = KVConnectorBlockState(set(), lambda _: None, {})
        self._move(output)
        self._tell(set())

    def _allocated(self, record: Allocated) -> None:
        request = self._request(record.state)
        external = 0 if request.request_id in self._declined else record.external
        if record.external:  # its blocks hold something else before
            loads = dict(zip(self._next(Step).loads, self._next(Ended).gets, strict=True))
            for pieces in loads[request.request_id].pieces:
                self._bytes.write(pieces, bytes(size_of(pieces)))
        blocks = SimpleNamespace(get_block_ids=lambda: record.tables)
        self._scheduler.update_state_after_alloc(request, blocks, external)

    def _step(self, record: Step) -> None:
        for state in record.states:
            self._request(state)
        ends = (each for each in self._stream[self._at :] if isinstance(each, Ended))
        end, output = next(ends), record.output
        output.kv_connector_block_state = KVConnectorBlockState(
            set(record.tables), record.tables.__getitem__, record.offloads
        )
        self._fill_windows(record)
        puts, next_puts = objects(end.puts), objects(next(ends, end).puts)
        for name, pieces in (*next_puts.items(), *puts.items()):
            self._bytes.write(pieces, bytes_of(name, size_of(pieces)))
        before = {name for name, _ in self._pool.objects()}
        self._move(output)
        stored = {name for name, _ in self._pool.objects()} - before
        # The end of a prompt is stored with the step that computes it, not with the next.
        early = (stored - puts.keys()) & next_puts.keys()
        more = {name for name in stored - puts.keys() - early if self._in_windows(name)}
        self._kept |= more
        self._same_names(stored - early - more, puts.keys() - before, "names stored in the step")
        self.counts["early"] += len(early)
        self.stored |= {name: size_of(pieces) for name, pieces in puts.items()}
        self._compare_loads(dict(zip(record.loads, end.gets, strict=True)))
        self._loading.update(record.loads)
        self.counts["preempted"] += len(output.preempted_req_ids or ())

    def _fill_windows(self, record: Step) -> None:
        """What the step computes of them; the built-in does not put all that ours keeps."""
        for state in record.states:
            hashes = self._requests[state.name].block_hashes
            end = state.computed + record.output.num_scheduled_tokens.get(state.name, 0)
            for chunk in range(state.computed // self._unit, end // self._unit):
                for group in self._windows:
                    block = record.tables[state.name][int(group)][chunk]
                    segments = self._map.segments(kvprism.GroupId(int(group)), block)
                    pieces = [self._bytes.piece(*segment) for segment in segments]
                    name = f"{self._prefix}@group:{group}@{hashes[chunk].hex()}"
                    self._bytes.write(pieces, bytes_of(name, size_of(pieces)))

    def _in_windows(self, name: str) -> bool:
        return name.rpartition("@group:")[2].split("@")[0] in self._windows

    def _move(self, output: Any) -> None:
        """Plans the step and does all of it."""
        metadata = self._scheduler.build_connector_meta(output)
        assert (metadata.refused, metadata.abandoned) == ((), ()), metadata
        if metadata.loads:
            plan = kvprism.StepPlan.decode(metadata.plan)
            self._planned |= {name: plan.blocks(job) for job, name in metadata.loads}
        self._worker.bind_connector_metadata(metadata)
        self._worker.start_load_kv(None)
        self._worker.wait_for_save()
        end = time.monotonic() + BOUND
        alive = True
        while alive:
            assert time.monotonic() < end, "transfers do not end"
            alive = self._worker._worker.counters()["jobs_alive"]
            results = self._worker.get_transfer_results(output.finished_req_ids)
            assert not results.failed_recving, results
        report = self._worker.build_connector_worker_meta()
        (self._late_reports if metadata.loads else self._reports).append(report)
        self._worker.clear_connector_metadata()

    def _compare_loads(self, recorded: dict[str, Moved]) -> None:
        """The same requests, blocks and bytes."""
        ours, self._planned = self._planned, {}
        theirs = {name: objects([get]) for name, get in recorded.items()}
        for name in self._declined & theirs.keys():
            for each, pieces in theirs.pop(name).items():
                self._bytes.write(pieces, bytes_of(each, size_of(pieces)))
        self._same(
            {name: sorted(blocks) for name, blocks in ours.items()},
            {name: sorted(map(self._block, found.values())) for name, found in theirs.items()},
            "blocks loaded",
        )
        for name, found in theirs.items():
            for each, pieces in found.items():
                right = self._bytes.read(pieces) == bytes_of(each, size_of(pieces))
                assert right, f"record {self._at}: load of {name}: not the bytes of {each}"
        self.counts["loads"] += len(theirs)

    def _block(self, pieces: list[Piece]) -> int:
        return self._block_at[self._bytes.address(pieces[0])]

    def _tail(self, record: Tail) -> None:
        request = self._request(record.state)
        assert not self._scheduler.register_finished_partial_tail(
            request, record.tables, record.offloads
        )
        self.counts["tails"] += 1

    def _finished(self, record: Finished) -> None:
        request = self._request(record.state)
        answer = self._scheduler.request_finished_all_groups(request, record.tables)
        assert answer == (False, None)
        self.counts[record.state.status.name] += 1
        self.counts["ended while they load"] += record.state.name in self._loading
        del self._requests[record.state.name]
        self._declined.discard(record.state.name)

    def _ended(self, record: Ended) -> None:
        self._loading -= record.received
        self._tell(record.received)

    def _tell(self, received: set[str]) -> None:
        reports = [each for each in self._reports if each]
        self._reports, self._late_reports = self._late_reports, []
        for each in reports or [None]:
            self._scheduler.update_connector_output(
                KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=each)
            )

    def _compare_pool(self) -> None:
        """Names, sizes and bytes."""
        ours = dict(self._pool.objects())
        theirs = self.stored | {name: ours[name] for name in self._kept - self.stored.keys()}
        self._same(ours, theirs, "objects")
        self.counts["kept"] = len(self._kept)
        wrong = [name for name in ours if self._pool.read(name) != bytes_of(name, ours[name])]
        assert not wrong, f"objects with the bytes of others: {wrong}"
