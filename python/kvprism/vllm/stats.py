"""Counters of both halves on vLLM's way to its log and to Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
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
}

# These also fall: what passes on the way is by how much they have changed, which adds up as well.
GAUGES: dict[str, tuple[str, str]] = {
    "health": ("health", "0 healthy, 1 degraded, 2 off."),
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
        """For the log: what is not 0."""
        return {
            f"kvprism_{name}": value
            for name, value in self.data.items()
            if value and name not in GAUGES
        }

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not any(self.data.values())


class Differences:
    """Counters since the last call, from counters since the start."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def take(self, counters: Mapping[str, Any]) -> StoreStats | None:
        """What has been added; None when nothing."""
        fresh = {}
        for path in (*COUNTERS, *GAUGES):
            value: Any = counters
            for part in path.split("."):
                value = value.get(part, 0) if isinstance(value, Mapping) else 0
            added = value - self._last.get(path, 0)
            if added:
                fresh[path] = added
                self._last[path] = value
        return StoreStats(data=fresh) if fresh else None


class StoreMetrics(KVConnectorPromMetrics):
    """A Prometheus counter for each of our own, named vllm:kvprism_<name>_total."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for path, (name, meaning) in (COUNTERS | GAUGES).items():
            kind = self._gauge_cls if path in GAUGES else self._counter_cls
            metric = kind(name=f"vllm:kvprism_{name}", documentation=meaning, labelnames=labelnames)
            self._counters[path] = {
                engine: metric.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what has happened in one engine."""
        for path, added in transfer_stats_data.items():
            engines = self._counters.get(path)
            if engines is not None and engine_idx in engines:
                engines[engine_idx].inc(added)
