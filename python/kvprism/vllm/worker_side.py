"""The connector's half in a vLLM worker: hands plans to a StoreWorker and tells what it reports."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._core import RankLoadEnd, RankLoads, ReadyToken, StoreWorker
from ..logs import forward_log
from ..rate_limited import RateLimited
from .cache_config import Described, segment_map
from .metadata import ReportMetadata, StepEnd, StepMetadata
from .mooncake import open_store
from .options import Options
from .ready import ready_source
from .stats import Differences, StoreStats

logger = logging.getLogger("vllm.kvprism")


@dataclass
class Results:
    """What a step tells vLLM of loads."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)

    def add(self, other: Results) -> None:
        """Takes in what another step has told, or not told."""
        self.finished |= other.finished
        self.failed |= other.failed
        self.failed_blocks |= other.failed_blocks

    def fail(self, requests: Iterable[str]) -> None:
        """Requests that wait for a load which nobody will see the end of."""
        requests = set(requests)
        self.finished |= requests
        self.failed |= requests


@dataclass
class _Told:
    """What went out with a step's output."""

    results: Results = field(default_factory=Results)
    reports: list[bytes] = field(default_factory=list)


class WorkerSide:
    """Translates; the StoreWorker's own thread moves the bytes. One thread, vLLM's worker."""

    def __init__(
        self,
        described: Described,
        options: Options,
        kv_cache_config: Any,
        rank: int,
        kv_caches: Mapping[str, Any],
        *,
        ranks: int = 1,
        only: bool = False,
        inner: bool = False,
    ) -> None:
        self._map = segment_map(described.projection, kv_cache_config, kv_caches)
        self._store = open_store(options, moves=True)
        self._worker = StoreWorker(
            described.schema,
            self._map,
            self._store,
            rank=rank,
            max_segments_per_call=options.max_segments_per_call,
            max_bytes_per_call=options.max_bytes_per_call,
            max_gets_in_flight=options.max_gets_in_flight,
            max_puts_in_flight=options.max_puts_in_flight,
            max_bytes_in_flight=options.max_bytes_in_flight,
            only=only,
        )
        # With one group vLLM keeps what lies before the first failed block, which only a prefix is
        # worth: before a window or a state there may be nothing. With several groups it cannot tell
        # whose block a number is.
        groups = described.projection.groups()
        self._blocks_tell = len(groups) == 1 and groups[0].hit == "prefix"
        self._shutdown_timeout = float(options.shutdown_timeout_seconds)
        self._ready = ready_source(_device_type(kv_caches))
        self._loads = RankLoads()
        self._names: dict[int, str] = {}
        self._bound: StepMetadata | None = None
        self._submitted = True
        self._collected = True  # the step's results were asked for, so it has not failed
        self._handled: BaseException | None = None  # when the step began
        self._inner = inner  # a pipeline stage before the last
        self._spoiled = -1  # the last step that failed: vLLM's cache is wrong until it is emptied
        self._reports: list[bytes] = []
        self._results = Results()
        self._step = 0  # the number of the last one
        self._answer = False
        self._told: dict[int, _Told] = {}  # in steps whose output vLLM may not have taken
        self._missed: list[range] = []  # steps whose metadata never came
        # Of several ranks vLLM may have counted what it was told in a step that failed afterwards:
        # told again, a load counts as over while another rank still writes.
        self._tells_again = ranks == 1
        self._closed = False
        self._unquiet = 0
        self._refused = RateLimited(logger, logging.ERROR)
        self._not_loaded = RateLimited(logger, logging.WARNING)
        self._lost = RateLimited(logger, logging.ERROR)
        self._differences = Differences()
        self._stirred = False
        logger.info("kvprism: rank %d stores through %s", rank, self._store.name)

    @property
    def released(self) -> bool:
        """Whether nothing of Mooncake has the cache's memory any more."""
        return self._closed and self.close() == 0

    def bind(self, metadata: StepMetadata) -> None:
        """Takes a step's metadata. With a drafter, the runner of an inner pipeline stage never
        comes to the end of the step before; any other one does, unless the step has failed."""
        self._submit(failed=not (self._inner and self._collected))
        self._bound = metadata
        self._submitted = self._collected = False
        self._handled = sys.exc_info()[1]
        if not metadata.step or metadata.step > self._step:
            self._results.fail(metadata.refused)
        if metadata.step:
            self._count(metadata)

    def _count(self, metadata: StepMetadata) -> None:
        """vLLM waits for every load until it is told, once: what a failed step has lost is not."""
        if metadata.step > self._step + 1:
            self._missed.append(range(self._step + 1, metadata.step))
            self._spoil(metadata.step - 1, metadata.fresh_since)
        self._step, self._answer = metadata.step, metadata.answer
        for step, taken in metadata.settled:
            told = self._told.pop(step, None)
            if told is not None and not taken:
                self._tell_again(told)
        for missed in metadata.missed:
            if missed.steps in self._missed:
                self._missed.remove(missed.steps)
                self._results.fail(missed.requests)
                self._abandon(missed.abandoned)

    def _tell_again(self, lost: _Told) -> None:
        self._reports[:0] = lost.reports  # these count once
        if self._tells_again:
            self._results.add(lost.results)
        else:
            self._lost(
                "kvprism: a step has failed whose output had ends of loads, which of several ranks "
                "none may tell again: start this engine anew; requests that may wait for ever: %s",
                ", ".join(sorted(lost.results.finished)),
            )

    def submit(self) -> None:
        """Hands the plan over, once, however often a runner comes here."""
        self._submit(failed=self._failing())

    def _failing(self) -> bool:
        """Whether the step ends with an exception: vLLM comes here all the same, in a `finally`."""
        error = sys.exc_info()[1]
        return error is not None and error is not self._handled

    def _submit(self, *, failed: bool) -> None:
        """After a failed step no byte is moved: layers that did not run hold other tokens."""
        metadata = self._bound
        if metadata is None or self._submitted:
            return
        self._submitted = True
        if failed:
            self._spoil(metadata.step, metadata.fresh_since)
        self._abandon(metadata.abandoned)
        if metadata.plan:
            token = ReadyToken.failed()
            try:
                if self._spoiled < metadata.fresh_since:
                    token = self._ready.token()
            finally:  # a device's error ends the step, and no load may be without an end
                self._take_plan(metadata, token)

    def _spoil(self, step: int, fresh_since: int) -> None:
        """vLLM has a failed step's blocks in its cache and its tokens as computed all the same,
        until a reset; also those of a step that failed before its metadata came."""
        before, self._spoiled = self._spoiled, max(self._spoiled, step)
        if before < fresh_since <= step:
            logger.error(
                "kvprism: a step has failed, and vLLM's own cache has its blocks: nothing is saved "
                "or loaded any more before reset_prefix_cache with reset_connector"
            )

    def _take_plan(self, metadata: StepMetadata, token: ReadyToken) -> None:
        taken = self._worker.submit(metadata.plan, token)
        if taken:
            self._loads.expect(metadata.plan)
            self._names.update(metadata.loads)
        elif taken.repeated:
            # Its loads may be writing: each is told once, by its own end.
            self._refused("kvprism: a plan came again: %s", taken.refusal)
        else:
            # Also of another version, in which no load can be found: those who wait are named.
            self._refused("kvprism: a plan was refused: %s", taken.refusal)
            self._results.fail(name for _, name in metadata.loads)

    def _abandon(self, jobs: Iterable[int]) -> None:
        for job in jobs:
            for end in self._loads.abandon(job):
                self._end(end, detach=True)

    def clear(self) -> None:
        """The step is over."""
        self.submit()
        self._bound = None

    def take_results(self) -> Results:
        """Loads that have ended since the last call; an exception takes nothing away."""
        if self._failing():
            return Results()
        self._collected = True
        self._take(self._worker.poll())
        results, self._results = self._results, Results()
        if results.finished and self._step:
            self._told.setdefault(self._step, _Told()).results.add(results)
        return results

    def _take(self, report: bytes | None) -> None:
        forward_log(logger)
        if report:
            self._stirred = True
            self._reports.append(report)
            for end in self._loads.take(report):
                self._end(end, detach=False)

    def _end(self, end: RankLoadEnd, *, detach: bool) -> None:
        name = self._names.pop(end.job, None)
        if name is None:
            # Its request was told as refused in the step of the plan: a reset overtook the load.
            return
        self._results.finished.add(name)
        if end.complete:
            return
        self._not_loaded(
            "kvprism: %d blocks of request %s could not be loaded", len(end.failed_blocks), name
        )
        if self._blocks_tell and not detach:
            self._results.failed_blocks.update(end.failed_blocks)
        else:
            self._results.failed.add(name)

    def take_reports(self) -> ReportMetadata | None:
        """What the scheduler has to hear."""
        if self._failing():
            return None
        ends = self._ends()
        if not (self._reports or ends):
            return None
        reports = ReportMetadata(b"".join(self._reports), ends)
        if self._step in self._told:
            self._told[self._step].reports += self._reports
        self._reports.clear()
        return reports

    def _ends(self) -> tuple[StepEnd, ...]:
        if not (self._answer or self._told or self._missed):
            return ()
        unsettled = tuple(step for step in self._told if step != self._step)
        return (StepEnd(self._step, unsettled, tuple(self._missed)),)

    def take_stats(self) -> StoreStats | None:
        """What this rank has moved of each group since the last call."""
        if not self._stirred or self._failing():
            return None
        self._stirred = False
        return self._differences.take_groups(self._worker.group_counters())

    def counters(self) -> dict[str, int]:
        """The StoreWorker's counters."""
        return self._worker.counters()

    def inherit(self, before: WorkerSide) -> None:
        """Takes over what a worker has not told that was closed, and the step that it was in.

        Its loads were for memory that may be another one now: their requests are computed.
        """
        self._reports += before._reports
        self._results.fail({*before._results.finished, *before._names.values()})
        self._step, self._answer = before._step, before._answer
        self._told, self._missed = before._told, before._missed
        for told in self._told.values():
            told.results.fail(told.results.finished)
            told.results.failed_blocks.clear()
        self._bound, self._submitted = before._bound, before._submitted
        self._collected, self._handled = before._collected, before._handled
        self._spoiled = before._spoiled

    def close(self) -> int:
        """Waits for what is in flight, within its bound; may be repeated.

        Returns:
            Calls of Mooncake that may still touch the memory.
        """
        if self._closed:
            self._unquiet = self._worker.close(0.0)  # calls return; what it said may be lost
            self._take(self._worker.poll())
            return self._unquiet
        self._closed = True
        self._unquiet = 1  # as long as nobody has said what is
        end = time.monotonic() + self._shutdown_timeout
        try:
            while self._worker.counters()["jobs_alive"]:
                left = end - time.monotonic()
                if left <= 0:
                    break
                self._take(self._worker.wait(min(left, 0.1)))
        except BaseException:
            # SIGTERM, from vLLM, which has a bound of its own: SIGKILL follows after some seconds.
            end = min(end, time.monotonic() + 2.0)
            raise
        finally:
            self._unquiet = self._worker.close(max(0.5, end - time.monotonic()))
        self._take(self._worker.poll())
        if self._unquiet:
            logger.warning(
                "kvprism: %d calls of Mooncake have not ended; their memory stays mapped",
                self._unquiet,
            )
        return self._unquiet


def _device_type(kv_caches: Mapping[str, Any]) -> str:
    for cache in kv_caches.values():
        tensor = cache[0] if isinstance(cache, (list, tuple)) else cache
        return str(tensor.device.type)
    return "cpu"
