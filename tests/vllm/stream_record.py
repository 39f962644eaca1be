"""vLLM's built-in connector, which writes down what it is asked, what it answers and what it moves.

The file that STREAM_RECORD names gets pickled records in the order of the calls; engine and worker
live in one process. So that no answer depends on time, a step ends when its objects have been
moved, lookups have the pace of ours (lookup_pace.py), and a load is told of a step after its own.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lookup_pace import PacedLookups, join, pace
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import (
    MooncakeStoreConnector,
)

BOUND = 60.0  # seconds for what is moved in a step

Tables = tuple[list[int], ...]


@dataclass
class View:
    """A tensor of the cache, in elements of its allocation."""

    allocation: int
    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class Memory:
    """The cache: bytes of its allocations, and the tensors of each layer."""

    allocations: list[int]
    layers: dict[str, View | list[View]]


@dataclass
class Engine:
    """What the connector's halves were made with."""

    vllm_config: Any
    kv_cache_config: Any


@dataclass
class Came:
    """A new request."""

    name: str
    prompt: list[int]
    hashes: list[bytes]


@dataclass
class State:
    """What has become of a request."""

    name: str
    tokens: list[int]
    """Generated since its last state."""
    computed: int
    status: Any


@dataclass
class Lookup:
    """A question for what is stored beyond the computed tokens, and its answer."""

    state: State
    computed: int
    found: int


@dataclass
class Allocated:
    """A request has blocks, of which so many external tokens are loaded."""

    state: State
    tables: Tables
    external: int


@dataclass
class Step:
    """The scheduler's output, and the requests whose loads begin with it, in their order."""

    output: Any
    states: list[State]
    tables: dict[str, Tables]
    offloads: dict[str, list[tuple[int, int, int]]]
    loads: list[str]


@dataclass
class Tail:
    """States that a request leaves behind when it ends."""

    state: State
    tables: Tables
    offloads: list[tuple[int, int, int]]


@dataclass
class Finished:
    """A request is over, its blocks are still there."""

    state: State
    tables: Tables


@dataclass
class Moved:
    """A call of Mooncake: each object's name, pieces (allocation, offset, bytes) and status."""

    names: list[str]
    pieces: list[list[tuple[int, int, int]]]
    statuses: list[int]


@dataclass
class Ended:
    """The end of a step: loads that the scheduler was told of, and what was moved."""

    received: set[str]
    puts: list[Moved] = field(default_factory=list)
    gets: list[Moved] = field(default_factory=list)


def read(path: Path) -> list[Any]:
    """All records, new ones each time."""
    records = []
    with path.open("rb") as file:
        while file.peek(1):
            records.append(pickle.load(file))
    return records


class _Recording:
    """The file, and what was moved since the last step."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "wb")  # noqa: SIM115  # until the engine is killed
        self.puts: list[Moved] = []
        self.gets: list[Moved] = []

    def write(self, record: Any) -> None:
        pickle.dump(record, self._file)
        self._file.flush()

    def end(self, received: set[str]) -> None:
        self.write(Ended(received, self.puts, self.gets))
        self.puts, self.gets = [], []


@functools.cache
def _recording() -> _Recording:
    """The one of this process: its halves write to the same."""
    return _Recording(os.environ["STREAM_RECORD"])


class _WatchedStore:
    """Mooncake's client, whose transfers are written down."""

    def __init__(self, store: Any, allocations: dict[int, int]) -> None:
        self._store = store
        self._allocations = allocations  # addresses and their bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _piece(self, address: int, size: int) -> tuple[int, int, int]:
        for number, (begin, length) in enumerate(self._allocations.items()):
            if begin <= address and address + size <= begin + length:
                return number, address - begin, size
        raise ValueError(f"{size} bytes at {address:#x} are not in the cache")

    def _moved(self, names: list[str], addresses: Any, sizes: Any, statuses: list[int]) -> Moved:
        pieces = [
            [self._piece(address, size) for address, size in zip(*each, strict=True)]
            for each in zip(addresses, sizes, strict=True)
        ]
        return Moved(list(names), pieces, list(statuses))

    def batch_put_from_multi_buffers(
        self, names: list[str], addresses: Any, sizes: Any, *rest: Any
    ) -> list[int]:
        statuses = self._store.batch_put_from_multi_buffers(names, addresses, sizes, *rest)
        _recording().puts.append(self._moved(names, addresses, sizes, statuses))
        return statuses

    def batch_get_into_multi_buffers(
        self, names: list[str], addresses: Any, sizes: Any, *rest: Any
    ) -> list[int]:
        statuses = self._store.batch_get_into_multi_buffers(names, addresses, sizes, *rest)
        _recording().gets.append(self._moved(names, addresses, sizes, statuses))
        return statuses


class RecordingConnector(MooncakeStoreConnector):
    """The built-in connector; see above."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._configs = Engine(vllm_config, kv_cache_config)
        self._begun = False
        self._requests: dict[str, Any] = {}
        self._told: dict[str, int] = {}  # generated tokens of each that are written down
        self._received: set[str] = set()
        self._late: set[str] = set()  # loads that are over and not told of
        half = self.connector_scheduler
        if half is not None:
            client = half.client
            self._lookups = PacedLookups(
                lambda name, tokens, hashes: client.lookup(name, tokens, hashes, non_block=False),
                kv_cache_config.cache_hit_alignment_tokens,
                late=False,
            )
            pace(half, self._lookups)

    # In the worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        allocations: dict[int, int] = {}

        def view(tensor: Any) -> View:
            storage = tensor.untyped_storage()
            allocations[storage.data_ptr()] = storage.nbytes()
            number = list(allocations).index(storage.data_ptr())
            shape, stride = tuple(tensor.shape), tuple(tensor.stride())
            return View(number, tensor.dtype, shape, stride, tensor.storage_offset())

        layers = {
            name: [view(each) for each in cache] if isinstance(cache, list) else view(cache)
            for name, cache in kv_caches.items()
        }
        _recording().write(Memory(list(allocations.values()), layers))
        inside = self.connector_worker
        inside.store = _WatchedStore(inside.store, allocations)
        super().register_kv_caches(kv_caches)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        inside = self.connector_worker
        for queue in (inside.kv_send_thread.request_queue, inside.recv_request_queue):
            join(queue, BOUND)
        results = super().get_transfer_results(finished_req_ids)
        assert not results.failed_recving
        told, self._late = self._late, set(results.finished_recving)
        return KVConnectorTransferResults(finished_recving=told)

    # In the scheduler.

    def _write(self, record: Any) -> None:
        if not self._begun:
            self._begun = True
            # What models have put into it cannot be pickled, and nobody needs it.
            config = copy.copy(self._configs.vllm_config)
            config.compilation_config = copy.copy(config.compilation_config)
            config.compilation_config.static_forward_context = {}
            _recording().write(Engine(config, self._configs.kv_cache_config))
        _recording().write(record)

    def _state(self, request: Any) -> State:
        name = request.request_id
        tokens = list(request.output_token_ids)[self._told[name] :]
        self._told[name] += len(tokens)
        return State(name, tokens, request.num_computed_tokens, request.status)

    def on_new_request(self, request: Any) -> None:
        name = request.request_id
        self._requests[name], self._told[name] = request, 0
        self._write(Came(name, list(request.prompt_token_ids), list(request.block_hashes)))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._lookups.computed = num_computed_tokens
        found, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        assert found is not None
        self._write(Lookup(self._state(request), num_computed_tokens, found))
        return found, later

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        tables = blocks.get_block_ids()
        self._write(Allocated(self._state(request), tables, num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        output, state = copy.copy(scheduler_output), scheduler_output.kv_connector_block_state
        output.kv_connector_block_state = None
        metadata = super().build_connector_meta(scheduler_output)
        self._write(
            Step(
                output,
                [self._state(request) for request in self._requests.values()],
                {name: state.get_block_ids(name) for name in state.req_ids},
                state.boundary_state_offloads,
                [
                    each.req_id
                    for each in metadata.requests
                    if each.load_spec is not None and each.load_spec.can_load
                ],
            )
        )
        return metadata

    def register_finished_partial_tail(
        self,
        request: Any,
        block_ids: Tables,
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        self._write(Tail(self._state(request), block_ids, partial_tail_offloads))
        return super().register_finished_partial_tail(request, block_ids, partial_tail_offloads)

    def request_finished_all_groups(
        self, request: Any, block_ids: Tables
    ) -> tuple[bool, dict[str, Any] | None]:
        self._write(Finished(self._state(request), block_ids))
        del self._requests[request.request_id], self._told[request.request_id]
        return super().request_finished_all_groups(request, block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        self._received |= connector_output.finished_recving or set()
        super().update_connector_output(connector_output)

    def reset_cache(self) -> bool | None:
        raise NotImplementedError("what ours would have to do then is not recorded")

    def take_events(self) -> Iterator[Any]:
        """vLLM's last call in a step."""
        _recording().end(self._received)
        self._received = set()
        return iter(super().take_events())
