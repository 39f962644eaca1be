"""Connectors with trouble of their own, or that look closer, for tests."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import kvprism
from kvprism.vllm import scheduler_side, worker_side
from kvprism.vllm.connector import KVPrismConnector

_open_store = worker_side.open_store


class CheckedConnector(KVPrismConnector):
    """Refuses calls that break the contract of the scheduler's half."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        scheduler_side.StoreScheduler = functools.partial(  # type: ignore[assignment, misc]
            kvprism.StoreScheduler, checked=True
        )
        super().__init__(*arguments, **named)


def _with_faults(seed: int = 1, **faults: float) -> None:
    def opened(*arguments: Any, **options: Any) -> Any:
        return kvprism.inject_faults(_open_store(*arguments, **options), seed=seed, **faults)

    worker_side.open_store = opened  # type: ignore[assignment]


class OneRankLateConnector(KVPrismConnector):
    """Every operation of the second rank's store ends late, so that ranks report at other steps."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._vllm_config.parallel_config.rank == 1:
            _with_faults(delay_seconds=0.2, delay=1.0)
        super().register_kv_caches(kv_caches)


class SomeRanksFailConnector(KVPrismConnector):
    """What the ranks FAILING load is never there, and every operation of the ranks LATE ends late:
    one rank tells of bad blocks while another still loads."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        rank = str(self._vllm_config.parallel_config.rank)
        faults: dict[str, float] = {}
        if rank in os.environ["FAILING"].split(","):
            faults["vanished"] = 1.0
        if rank in os.environ.get("LATE", "").split(","):
            faults |= {"delay_seconds": 0.2, "delay": 1.0}
        if faults:  # each rank lacks blocks of its own
            _with_faults(seed=1 + int(rank), **faults)
        super().register_kv_caches(kv_caches)


class TellsOfLoadsConnector(KVPrismConnector):
    """Makes a file when the first bytes of a load have arrived."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        if self._worker is not None and self._worker.counters()["bytes_fetched"]:
            Path(os.environ["TELL_LOADS"]).touch()
        return super().get_transfer_results(finished_req_ids)
