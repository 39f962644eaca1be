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
    "ledger.quarantined": ("quarantined", "Jobs whose blocks went to quarantine."),
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
        return {f"kvprism_{name}": value for name, value in self.data.items() if value}

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
        for path in COUNTERS:
            value: Any = counters
            for part in path.split("."):
                value = value[part]
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
        for path, (name, meaning) in COUNTERS.items():
            metric = self._counter_cls(
                name=f"vllm:kvprism_{name}", documentation=meaning, labelnames=labelnames
            )
            self._counters[path] = {
                engine: metric.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what has happened in one engine."""
        for path, added in transfer_stats_data.items():
            engines = self._counters.get(path)
            if engines is not None and engine_idx in engines:
                engines[engine_idx].inc(added)
