"""Counters of both halves on vLLM's way to its log and to Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

# Name in the halves' counters to (name of the Prometheus counter, what it counts).
COUNTERS: dict[str, tuple[str, str]] = {
    "lookups": ("lookups", "Requests that were looked up."),
    "lookups_late": ("lookups_late", "Lookups whose answer came too late: misses."),
    "lookups_failed": ("lookups_failed", "Lookups that the store refused: misses."),
    "hit_tokens": ("hit_tokens", "Tokens that loads were planned for."),
    "loaded_tokens": ("loaded_tokens", "Tokens that loads delivered."),
    "loads": ("loads", "Loads that were planned."),
    "loads_failed": ("loads_failed", "Loads that did not deliver everything."),
    "load_races": ("load_races", "Objects that a lookup saw and the load did not."),
    "loaded_objects": ("loaded_objects", "Objects loaded, all ranks together."),
    "loaded_bytes": ("loaded_bytes", "Bytes loaded, all ranks together."),
    "saves": ("saves", "Saves that were planned."),
    "saved_objects": ("saved_objects", "Objects stored or found stored, all ranks together."),
    "saved_bytes": ("saved_bytes", "Bytes stored, all ranks together."),
    "save_chunks_failed": ("save_chunks_failed", "Chunks that could not be stored."),
    "saves_dropped": ("saves_dropped", "Saves left out while saving paused."),
    "bypasses": ("bypasses", "Requests computed after a failed load."),
    "incidents": ("incidents", "Quarantines, silent ranks and loads with a mismatch."),
    "mismatches": ("mismatches", "Chunks that were not what had been stored."),
    "objects_removed": ("objects_removed", "Damaged objects that were removed."),
    "purges": ("purges", "Purges begun."),
    "objects_purged": ("objects_purged", "Objects that purges removed."),
    "lookup_time.count": ("lookups_timed", "Lookups whose duration was measured."),
    "lookup_time.sum_us": ("lookup_us", "Microseconds from question to answer, together."),
    "load_time.count": ("loads_timed", "Loads whose duration was measured."),
    "load_time.sum_us": ("load_us", "Microseconds from a load's plan to its end, together."),
    "save_time.count": ("saves_timed", "Saves whose duration was measured."),
    "save_time.sum_us": ("save_us", "Microseconds from a save's plan to its outcome, together."),
    "ledger.quarantined": ("quarantined", "Jobs whose blocks went to quarantine."),
    "index.circuit_open": ("circuit_open", "Questions ended at once while the store was away."),
    "index.replacements": ("replacements", "Clients of the scheduler that replaced a broken one."),
}

# These also fall: what passes on the way is by how much they have changed, which adds up as well.
GAUGES: dict[str, tuple[str, str]] = {
    "health": ("health", "0 healthy, 1 degraded, 2 off."),
    "mode": ("mode", "0 read_write, 1 read_only, 2 write_only, 3 off."),
    "ledger.alive": ("jobs_alive", "Jobs that may still touch blocks."),
    "ledger.blocks_held": ("blocks_held", "References of jobs on blocks."),
    "ledger.blocks_in_quarantine": ("blocks_in_quarantine", "Of those, in quarantine."),
    "index.usable": ("usable", "1 while the scheduler's client can be asked."),
}

# Upper bounds of the buckets of a duration, in microseconds.
BOUNDS_US = (
    *(500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000),
    *(1_000_000, 2_000_000, 5_000_000, 20_000_000, 60_000_000),
)
# Under "durations.<name>.up_to_us_<bound>"; in Prometheus the bound is the label "le", in seconds.
DURATIONS: dict[str, tuple[str, str]] = {
    "lookup_time": ("lookup_seconds_bucket", "Lookups answered within `le` seconds."),
    "load_time": ("load_seconds_bucket", "Loads over within `le` seconds of their plan."),
    "save_time": ("save_seconds_bucket", "Saves with an outcome within `le` seconds."),
}
_BUCKETS = tuple(
    f"durations.{name}.up_to_us_{bound}" for name in DURATIONS for bound in (*BOUNDS_US, "inf")
)

# What each rank counts of each group, under "groups.<number>.<name>"; in Prometheus the number is
# the label "group".
GROUP_COUNTERS: dict[str, tuple[str, str]] = {
    "stored_objects": ("group_stored_objects", "Objects stored or found stored."),
    "stored_bytes": ("group_stored_bytes", "Bytes stored."),
    "loaded_objects": ("group_loaded_objects", "Objects loaded."),
    "loaded_bytes": ("group_loaded_bytes", "Bytes loaded."),
    "missed_objects": ("group_missed_objects", "Objects that a load no longer found."),
    "missed_bytes": ("group_missed_bytes", "Bytes that a load no longer found."),
    "failed_objects": ("group_failed_objects", "Objects whose load or save failed otherwise."),
    "get_time.count": ("group_gets_timed", "Calls that loaded objects of the group."),
    "get_time.sum_us": ("group_get_us", "Microseconds of those calls, together."),
    "put_time.count": ("group_puts_timed", "Calls that stored objects of the group."),
    "put_time.sum_us": ("group_put_us", "Microseconds of those calls, together."),
}


class StoreStats(KVConnectorStats):
    """What has happened since the last time; adding up is all that is ever done with it."""

    def reset(self) -> None:
        """Forgets everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds another one; the order does not matter."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log's one line: what is not 0, without the groups of large models."""
        return {
            f"kvprism_{name}": value
            for name, value in self.data.items()
            if value and name not in GAUGES and not name.startswith(("groups.", "durations."))
        }

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not any(self.data.values())


Paths = tuple[tuple[str, tuple[str, ...]], ...]


def _split(names: Iterable[str]) -> Paths:
    """Each name with the steps to its value, which steps of an engine then need not look for."""
    return tuple((name, tuple(name.split("."))) for name in names)


_PATHS = _split((*COUNTERS, *GAUGES, *_BUCKETS))
_GROUP_PATHS = _split(GROUP_COUNTERS)


class Differences:
    """Counters since the last call, from counters since the start."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def begin_again(self) -> None:
        """The counters start from 0; gauges go on from what they were."""
        self._last = {name: value for name, value in self._last.items() if name in GAUGES}

    def take(self, counters: Mapping[str, Any]) -> StoreStats | None:
        """What has been added; None when nothing."""
        fresh = self._added(counters, _PATHS, "")
        return StoreStats(data=fresh) if fresh else None

    def take_groups(self, groups: Sequence[Mapping[str, Any]]) -> StoreStats | None:
        """The same of a worker's groups."""
        fresh: dict[str, int] = {}
        for number, counters in enumerate(groups):
            fresh |= self._added(counters, _GROUP_PATHS, f"groups.{number}.")
        return StoreStats(data=fresh) if fresh else None

    def _added(self, counters: Mapping[str, Any], paths: Paths, prefix: str) -> dict[str, int]:
        fresh = {}
        for path, steps in paths:
            value: Any = counters
            for step in steps:
                value = value.get(step, 0) if isinstance(value, Mapping) else 0
            name = prefix + path
            added = value - self._last.get(name, 0)
            if added:
                fresh[name] = added
                self._last[name] = value
        return fresh


class StoreMetrics(KVConnectorPromMetrics):
    """A Prometheus counter for each of our own, named vllm:kvprism_<name>_total.

    Of several API servers each hears of a part of the steps: what they show has to be summed.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        self._levels: dict[tuple[str, int], int] = {}  # of gauges: Ray's can only be set
        for path, (name, meaning) in (COUNTERS | GAUGES).items():
            kind = self._gauge_cls if path in GAUGES else self._counter_cls
            more = {"multiprocess_mode": "sum"} if path in GAUGES else {}
            metric = kind(
                name=f"vllm:kvprism_{name}", documentation=meaning, labelnames=labelnames, **more
            )
            self._counters[path] = {
                engine: metric.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

        self._values = per_engine_labelvalues
        self._groups = {
            path: self._counter_cls(
                name=f"vllm:kvprism_{name}",
                documentation=meaning,
                labelnames=[*labelnames, "group"],
            )
            for path, (name, meaning) in GROUP_COUNTERS.items()
        }
        self._durations = {
            path: self._counter_cls(
                name=f"vllm:kvprism_{name}", documentation=meaning, labelnames=[*labelnames, "le"]
            )
            for path, (name, meaning) in DURATIONS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what has happened in one engine."""
        for path, added in transfer_stats_data.items():
            kind, _, rest = path.partition(".")
            if kind == "groups":
                group, _, name = rest.partition(".")
                if name in self._groups and engine_idx in self._values:
                    values = (*self._values[engine_idx], group)
                    self._groups[name].labels(*values).inc(added)
                continue
            if kind == "durations":
                name, _, bound = rest.partition(".up_to_us_")
                if name in self._durations and engine_idx in self._values:
                    self._within(name, bound, self._values[engine_idx], added)
                continue
            engines = self._counters.get(path)
            if engines is None or engine_idx not in engines:
                continue
            if path in GAUGES:
                at = (path, engine_idx)
                self._levels[at] = self._levels.get(at, 0) + added
                engines[engine_idx].set(self._levels[at])
            else:
                engines[engine_idx].inc(added)

    def _within(self, name: str, bound: str, values: list[object], added: int) -> None:
        """Like the buckets of a histogram: each counts what took no longer than its bound."""
        first = BOUNDS_US.index(int(bound)) if bound != "inf" else len(BOUNDS_US)
        for us in BOUNDS_US[first:]:
            self._durations[name].labels(*values, str(us / 1e6)).inc(added)
        self._durations[name].labels(*values, "+Inf").inc(added)
