"""Connectors with trouble of their own, for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import kvprism
from kvprism.vllm import worker_side
from kvprism.vllm.connector import KVPrismConnector

_open_store = worker_side.open_store


class OneRankLateConnector(KVPrismConnector):
    """Every operation of the second rank's store ends late, so that ranks report at other steps."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._vllm_config.parallel_config.rank == 1:

            def late(*arguments: Any, **options: Any) -> Any:
                store = _open_store(*arguments, **options)
                return kvprism.inject_faults(store, delay_seconds=0.2, delay=1.0)

            worker_side.open_store = late  # type: ignore[assignment]
        super().register_kv_caches(kv_caches)


class TellsOfLoadsConnector(KVPrismConnector):
    """Makes a file when the first bytes of a load have arrived."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        if self._worker is not None and self._worker.counters()["bytes_fetched"]:
            Path(os.environ["TELL_LOADS"]).touch()
        return super().get_transfer_results(finished_req_ids)
