"""Connectors with trouble of their own, or that look closer, for tests."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvprism
from kvprism.vllm import scheduler_side, worker_side
from kvprism.vllm.connector import KVPrismConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

_open_store = worker_side.open_store
LATE = {"delay_seconds": 0.2, "delay": 1.0}


class CheckedConnector(KVPrismConnector):
    """Refuses calls that break the contract of the scheduler's half."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        scheduler_side.StoreScheduler = functools.partial(  # type: ignore[assignment, misc]
            kvprism.StoreScheduler, checked=True
        )
        super().__init__(*arguments, **named)


def _with_faults(*kinds: dict[str, float], seed: int = 1) -> None:
    """Each of them befalls every operation: one injector draws one fault of an operation."""

    def opened(*arguments: Any, **options: Any) -> Any:
        store = _open_store(*arguments, **options)
        for kind in kinds:
            store = kvprism.inject_faults(store, seed=seed, **kind)
        return store

    worker_side.open_store = opened  # type: ignore[assignment]


class OneRankLateConnector(KVPrismConnector):
    """Every operation of the second rank's store ends late, so that ranks report at other steps."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._vllm_config.parallel_config.rank == 1:
            _with_faults(LATE)
        super().register_kv_caches(kv_caches)


class SomeRanksFailConnector(KVPrismConnector):
    """What the ranks FAILING load is never there, and every operation of the ranks LATE ends late:
    one rank tells of bad blocks while another still loads."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        rank = str(self._vllm_config.parallel_config.rank)
        faults: list[dict[str, float]] = []
        if rank in os.environ["FAILING"].split(","):
            faults.append({"vanished": 1.0})
        if rank in os.environ.get("LATE", "").split(","):
            faults.append(LATE)
        if faults:  # each rank lacks blocks of its own
            _with_faults(*faults, seed=1 + int(rank))
        super().register_kv_caches(kv_caches)


class TellsOfLoadsConnector(KVPrismConnector):
    """Makes a file when the first bytes of a load have arrived."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        if self._worker is not None and self._worker.counters()["bytes_fetched"]:
            Path(os.environ["TELL_LOADS"]).touch()
        return super().get_transfer_results(finished_req_ids)


@dataclass
class _Blocks(KVConnectorMetadata):
    """Where a step's loads would go."""

    blocks: list[int] = field(default_factory=list)


class FailsInStepConnector(KVConnectorBase_V1):
    """Says that it has the first blocks of prompts that begin with the token FAILS_FOR, loads
    inside the step, and brings nothing. The file FAILS_IN_STEP gets a line for each such step."""

    _BLOCKS = 4

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._planned = _Blocks()
        self._failed: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        wanted = request.prompt_token_ids[0] == int(os.environ["FAILS_FOR"])
        size = self._vllm_config.cache_config.block_size
        return (self._BLOCKS * size if wanted and not num_computed_tokens else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._planned.blocks += blocks.get_block_ids()[0][: self._BLOCKS]

    def build_connector_meta(self, scheduler_output: Any) -> _Blocks:
        planned, self._planned = self._planned, _Blocks()
        return planned

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        planned = self._get_connector_metadata()
        assert isinstance(planned, _Blocks)
        if planned.blocks:
            self._failed.update(planned.blocks)
            with Path(os.environ["FAILS_IN_STEP"]).open("a") as told:
                told.write(f"{len(planned.blocks)} blocks\n")

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything fails at once."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
