"""What the store gains and loses, as vLLM's KV cache events."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from .._core import Projection, StoreChange, StoreScheduler

_FINISHED_KEPT = 1024  # with saves in flight; saves of older ones are not announced


def wanted(vllm_config: Any) -> bool:
    """Whether the operator has asked vLLM for events."""
    config = getattr(vllm_config, "kv_events_config", None)
    return bool(config is not None and config.enable_kv_cache_events)


class Announcer:
    """Makes events of changes: group ids and hashes are those that vLLM's own events have.

    One thread, vLLM's scheduler.
    """

    def __init__(self, kv_cache_config: Any, projection: Projection) -> None:
        from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

        self._hash_block_size = projection.hash_block_size
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        # What a block stands for, which is more than a rank's part of it where context is split.
        self._sizes = [group.tokens_per_block for group in projection.groups()]
        self._kinds = [get_kv_cache_spec_kind(spec).value for spec in specs]
        self._windows = [getattr(spec, "sliding_window", None) for spec in specs]
        self._live: dict[int, Any] = {}
        self._finished: OrderedDict[int, Any] = OrderedDict()
        self._cleared = False

    def begin(self, number: int, request: Any) -> None:
        """A request whose chunks may be stored."""
        self._live[number] = request

    def finish(self, number: int) -> None:
        """It is over; saves of it may be in flight, which the next `events` tells."""
        request = self._live.pop(number, None)
        if request is not None:
            self._finished[number] = request
            if len(self._finished) > _FINISHED_KEPT:
                self._finished.popitem(last=False)

    def clear(self) -> None:
        """The store begins to be emptied."""
        self._cleared = True

    def take(self, core: StoreScheduler) -> list[Any]:
        """Events of what has changed; only finished requests with saves in flight are kept."""
        from vllm.distributed.kv_events import AllBlocksCleared

        cleared, self._cleared = self._cleared, False
        events = [AllBlocksCleared()] if cleared else []
        events += self.events(core.take_changes())
        if self._finished:
            saving = core.saving_requests()
            for number in [number for number in self._finished if number not in saving]:
                del self._finished[number]
        return events

    def events(self, changes: Iterable[StoreChange]) -> list[Any]:
        """Consecutive chunks of one request and group become one event."""
        runs: list[list[StoreChange]] = []
        for change in changes:
            last = runs[-1][-1] if runs else None
            follows = (
                last is not None
                and (last.stored, last.request) == (change.stored, change.request)
                and int(last.group) == int(change.group)
                and last.chunk + 1 == change.chunk
                and last.hash == change.parent
                and self._length(last) == self._length(change)
            )
            if follows:
                runs[-1].append(change)
            else:
                runs.append([change])
        made = [self._stored(run) if run[0].stored else self._removed(run) for run in runs]
        return [event for event in made if event is not None]

    def _stored(self, run: list[StoreChange]) -> Any:
        """None when nobody knows the tokens any more: a listener could not use it."""
        from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored

        first, group = run[0], int(run[0].group)
        size = self._length(first)
        request = self._request_of(run)
        if request is None:
            return None
        adapter = getattr(request, "lora_request", None)
        return BlockStored(
            block_hashes=[_external(change.hash) for change in run],
            parent_block_hash=_external(first.parent) if first.parent else None,
            token_ids=list(request.all_token_ids[first.tokens - size : run[-1].tokens]),
            block_size=size,
            lora_id=adapter.adapter_id if adapter else None,
            medium=MEDIUM_STORAGE,
            lora_name=adapter.name if adapter else None,
            extra_keys=_extra_keys(request, run, size),
            group_idx=group,
            kv_cache_spec_kind=self._kinds[group],
            kv_cache_spec_sliding_window=self._windows[group],
            locality="REMOTE",
            session_id=getattr(request, "session_id", None),
        )

    @staticmethod
    def _removed(run: list[StoreChange]) -> Any:
        from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved

        return BlockRemoved(
            block_hashes=[_external(change.hash) for change in run],
            medium=MEDIUM_STORAGE,
            group_idx=int(run[0].group),
            locality="REMOTE",
        )

    def _length(self, change: StoreChange) -> int:
        """Tokens of a block, or of the hash unit that ends a prefix inside one."""
        size: int = self._sizes[int(change.group)]
        return size if change.tokens % size == 0 else self._hash_block_size

    def _request_of(self, run: list[StoreChange]) -> Any:
        """The request, unless its tokens are no longer those that were stored."""
        number = run[0].request
        request = self._live.get(number, self._finished.get(number))
        at = run[-1].tokens // self._hash_block_size - 1
        hashes = () if request is None else request.block_hashes
        return request if at < len(hashes) and hashes[at] == run[-1].hash else None


def _external(block_hash: bytes) -> Any:
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    return maybe_convert_block_hash(BlockHash(block_hash))


def _extra_keys(request: Any, run: list[StoreChange], size: int) -> Any:
    """What vLLM's own events say beside the tokens: adapters, media, salts."""
    from vllm.v1.core import kv_cache_utils

    found = [
        kv_cache_utils.generate_block_hash_extra_keys(
            request, change.tokens - size, change.tokens, 0
        )[0]
        for change in run
    ]
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", None)  # since 0.31
    return found if untagged is None else untagged(found)
