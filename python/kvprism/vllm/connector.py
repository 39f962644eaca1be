"""KVPrismConnector: vLLM's connector contract on top of the two halves."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_transfer_state import (
    get_kv_transfer_group,
    has_kv_transfer_group,
)

from .._core import ObjectStore
from ..logs import forward_log
from .cache_config import Described, check_ranks, describe, held_groups
from .contract import check_contract
from .events import Announcer, wanted
from .idle_side import IdleSide
from .meaning import agreed
from .metadata import ReportMetadata, StageMetadata, StepMetadata
from .mooncake import open_store
from .options import read_options
from .problems import Problems
from .scheduler_side import SchedulerSide
from .stats import StoreMetrics, StoreStats
from .worker_side import WorkerSide

logger = logging.getLogger("vllm.kvprism")

_PRODUCERS = ("kv_producer", "kv_both")


class KVPrismConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores and loads KV blocks of hybrid models through Mooncake.

    One object of this class lives in vLLM's scheduler and one in each worker. All calls of one
    object come from one thread.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_contract(KVPrismConnector)
        self._scheduler: SchedulerSide | IdleSide | None = None
        self._worker: WorkerSide | None = None
        self._lent: ObjectStore | None = None  # in a worker: has its segment, and does nothing
        self._described: Described | None = None  # in a worker: what its keys are made of
        transfer = vllm_config.kv_transfer_config
        self._options = read_options(transfer.kv_connector_extra_config)
        _refuse_what_cannot_be_right(vllm_config)
        _choose_policy(transfer, self._options.load_failure_policy)
        loads = self._options.enable_lookup
        saves = transfer.kv_role in _PRODUCERS or self._options.save_decode_cache
        # Such an instance only gives memory to the pool, so it may have any cache (W-C27).
        self._idle = not (loads or saves)
        if role != KVConnectorRole.SCHEDULER:
            return
        if self._idle:
            self._scheduler = IdleSide()
        else:
            described = self._describe()
            self._scheduler = SchedulerSide(
                described,
                self._options,
                loads=loads,
                saves=saves,
                takes_back=vllm_config.scheduler_config.policy != "fcfs",
                announcer=(
                    Announcer(kv_cache_config, described.projection)
                    if wanted(vllm_config)
                    else None
                ),
                stages=self._stages(described, {}),
            )

    def _describe(
        self,
        stages: Mapping[int, Collection[int]] | None = None,
        meaning: Mapping[str, Any] | None = None,
    ) -> Described:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        config = self._kv_cache_config
        sizes = resolve_kv_cache_block_sizes(config, self._vllm_config)
        return describe(
            self._vllm_config,
            config,
            sizes,
            self._options.cache_prefix,
            self._options.key_schema,
            stages,
            meaning,
        )

    def _stages(
        self, described: Described, told: Mapping[int, StageMetadata]
    ) -> tuple[StageMetadata, ...]:
        """Of several pipeline stages: what each holds. Who says nothing holds all groups."""
        count = self._vllm_config.parallel_config.pipeline_parallel_size
        if count == 1:
            return ()
        silent = StageMetadata(
            tuple(range(described.projection.num_groups)), described.schema.fingerprint
        )
        return tuple(
            replace(told.get(stage, silent), meaning=None, facts=()) for stage in range(count)
        )

    # What kind of connector this is.

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """A load starts at the hit that all groups share."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a later miss."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """The cache's memory is registered with Mooncake for as long as the worker lives."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Any that vLLM has chosen."""
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Nothing happens between layers."""
        return False

    def get_finished_count(self) -> int | None:
        """Every rank tells of every load."""
        return None

    # In a worker.

    def get_mem_pool_context(self) -> Any:
        """vLLM's own allocator."""
        return None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Proves where the blocks lie and registers their memory with Mooncake."""
        if self._lent is None and (self._idle or self._options.mode == "embedded"):
            self._lent = open_store(self._options, lends=True)
        if self._idle:
            return
        self._tell_of_outer_policy()
        before = self._worker
        if before is not None:
            _need_quiet(before.close())
        self._described = self._describe()
        self._worker = WorkerSide(
            self._described,
            self._options,
            self._kv_cache_config,
            self._vllm_config.parallel_config.rank,
            kv_caches,
            ranks=self._vllm_config.parallel_config.world_size,
            only=self._worker is None,
            inner=self._stage() < self._vllm_config.parallel_config.pipeline_parallel_size - 1,
        )
        if before is not None:
            self._worker.inherit(before)

    def _tell_of_outer_policy(self) -> None:
        """MultiConnector gives its children copies of the configuration: ours changes nothing."""
        if not has_kv_transfer_group() or get_kv_transfer_group() is self:
            return
        outer = get_kv_transfer_group()._vllm_config.kv_transfer_config.kv_load_failure_policy
        if outer != self._options.load_failure_policy:
            logger.warning(
                "kvprism: load_failure_policy %r has no effect in MultiConnector, whose own is %r: "
                "set kv_load_failure_policy there",
                self._options.load_failure_policy,
                outer,
            )

    def unregister_kv_caches(self) -> None:
        """Called before the cache is unmapped, which an engine can do without sleep mode as well.

        Raises:
            ConfigError: While the memory is registered: nothing is unmapped then.
        """
        if self._worker is None or self._worker.released:
            return
        problems = Problems()
        problems.add("KV cache", "unmapped", "memory that stays while Mooncake has it registered")
        problems.raise_if_any("kvprism")

    def restore_kv_caches(self) -> None:
        """Nothing was unmapped: see unregister_kv_caches."""

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        """Blocks are moved from where they are."""

    def finish_forward(self) -> None:
        """Loads never feed the forward pass of their own step."""

    def reset_capture_state(self) -> None:
        """Nothing is captured."""

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Blocks of saves in flight are referenced, so nobody overwrites them."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Takes the step's metadata."""
        super().bind_connector_metadata(connector_metadata)
        if not isinstance(connector_metadata, StepMetadata):
            return
        if connector_metadata.stages:
            self._compare_stage(connector_metadata.stages)
        if self._worker is not None:
            self._worker.bind(connector_metadata)

    def clear_connector_metadata(self) -> None:
        """Ends the step, and submits its plan where no runner has done so."""
        if self._worker is not None:
            self._worker.clear()
        super().clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads go with the step's plan: see wait_for_save."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads never feed the forward pass of their own step."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """Submits the step's plan: kernels that write its blocks have been queued by now."""
        if self._worker is not None:
            self._worker.submit()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """For engines that do not know get_transfer_results()."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended on this rank, once each."""
        if self._worker is None:
            if self._lent is not None:  # nobody else hands on what its client says
                forward_log(logger)
            return KVConnectorTransferResults()
        results = self._worker.take_results()
        self._failed_blocks = self._failed_blocks | results.failed_blocks
        return KVConnectorTransferResults(
            finished_recving=results.finished, failed_recving=results.failed
        )

    _failed_blocks: set[int] = set()  # noqa: RUF012  # replaced, never changed

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of the loads that get_transfer_results() has just named, for one group."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def get_kv_connector_stats(self) -> StoreStats | None:
        """What has happened since the last call: the scheduler's half counts for all ranks, and
        each worker's what it has moved of each group."""
        half = self._scheduler or self._worker
        return None if half is None else half.take_stats()

    def get_kv_connector_kv_cache_events(self) -> Any:
        """None: the store's content is not announced."""
        return None

    def get_handshake_metadata(self) -> StageMetadata | None:
        """What the scheduler cannot know: the groups that this rank holds, since it knows stage
        0's alone, and what the model has made of vLLM's configuration.

        MultiConnector hands it to its other children, most of which do not understand it: there
        only a rank that lacks a group speaks.
        """
        held = held_groups(self._kv_cache_config)
        alone = has_kv_transfer_group() and get_kv_transfer_group() is self
        lacks = len(held) < len(self._kv_cache_config.kv_cache_groups)
        if self._idle or not (alone or lacks):
            return None
        described = self._described or self._describe()
        meaning = described.meaning if alone else None
        facts = tuple(described.projection.digest_facts)
        return StageMetadata(held, described.schema.fingerprint, meaning, facts)

    def _stage(self) -> int:
        """This rank's pipeline stage."""
        parallel = self._vllm_config.parallel_config
        per_stage: int = parallel.tensor_parallel_size * getattr(
            parallel, "prefill_context_parallel_size", 1
        )
        return int(parallel.rank) // per_stage

    def _compare_stage(self, stages: Sequence[StageMetadata]) -> None:
        """Says what the scheduler does not know of this stage: it looks for other objects."""
        stage = self._stage()
        taken, held = stages[stage], held_groups(self._kv_cache_config)
        if taken.groups != held:
            logger.error(
                "kvprism: pipeline stage %d holds groups %s, and the scheduler, which has not "
                "heard so, takes it to hold %s: nothing will be found; in MultiConnector kvprism "
                "must be the first child that shakes hands",
                stage,
                list(held),
                list(taken.groups),
            )
        fingerprint = (self._described or self._describe()).schema.fingerprint
        if taken.fingerprint != fingerprint:
            logger.error(
                "kvprism: pipeline stage %d names its objects with the fingerprint %s, and the "
                "scheduler with %s: nothing will be found; layers of one group differ in size, "
                "and this stage begins with another one",
                stage,
                fingerprint,
                taken.fingerprint,
            )

    def build_connector_worker_meta(self) -> ReportMetadata | None:
        """What the scheduler's half has to hear."""
        return None if self._worker is None else self._worker.take_reports()

    # In the scheduler.

    def _half(self) -> SchedulerSide | IdleSide:
        if self._scheduler is None:
            raise RuntimeError("a call for vLLM's scheduler came to a worker's connector")
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Takes the pool of the cache manager."""
        super().bind_kv_cache_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Takes the pool, whose references keep the blocks of jobs."""
        self._half().bind_pool(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens can be loaded beyond the computed ones."""
        return self._half().lookup(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plans the load, for which vLLM has made room."""
        self._half().allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """The step's jobs."""
        return self._half().end_step(scheduler_output)

    def on_new_request(self, request: Any) -> None:
        """A request has come."""
        self._half().new_request(request)

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes in the workers' reports."""
        self._half().take_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks in use by jobs are referenced, so nothing has to be delayed."""
        self._half().finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished, for models with several groups."""
        self._half().finished(request)
        return False, None

    def register_finished_partial_tail(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """The states that end a prompt; jobs reference their blocks, so nothing is delayed."""
        self._half().save_last_states(request, block_ids, partial_tail_offloads)
        return False

    def take_events(self) -> Iterable[Any]:
        """What the store has gained and lost, when vLLM publishes events."""
        return () if self._scheduler is None else self._scheduler.take_events()

    def has_pending_block_frees(self) -> bool:
        """Blocks in flight come back soon, but nobody can say when."""
        return False

    def has_pending_push_work(self) -> bool:
        """True while a job uses blocks."""
        return self._scheduler is not None and self._scheduler.pending_work()

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """Of a single stage there is nothing to learn."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Takes what only workers know, before the first request comes; may be repeated."""
        if self._idle:
            return
        ranks = {
            rank: words
            for rank, words in metadata.items()
            if isinstance(words, StageMetadata)  # in MultiConnector others' words come here too
        }
        meanings = {rank: words.meaning for rank, words in ranks.items() if words.meaning}
        meaning = agreed(meanings) if meanings else None
        described = self._describe(meaning=meaning)
        told = {stage: words for (stage, _), words in ranks.items()}
        check_ranks(
            described, {rank: (words.fingerprint, words.facts) for rank, words in ranks.items()}
        )
        stages = self._stages(described, told)
        held = {stage: words.groups for stage, words in enumerate(stages)}
        if any(len(groups) < described.projection.num_groups for groups in held.values()):
            described = self._describe(held, meaning)
        self._half().learn(described, stages)

    def reset_cache(self) -> bool | None:
        """The engine's caches are void, e.g. after a change of weights.

        What the store holds of this model is void too and is removed, after jobs in flight have
        ended. Until that is done the store is not used.
        """
        if self._scheduler is None:
            return None
        self._scheduler.purge()
        if self._idle:
            return True
        logger.warning(
            "kvprism: the caches were reset: this model's objects are removed from the store, "
            "which is not used before that is done"
        )
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StoreStats:
        """Stats that another process has sent as a dictionary."""
        return StoreStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> StoreMetrics:
        """Counters for Prometheus."""
        return StoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # In both.

    def shutdown(self) -> None:
        """Ends this half; may be repeated."""
        end = time.monotonic() + self._options.shutdown_timeout_seconds
        try:
            if self._worker is not None:
                self._worker.close()
        except BaseException:
            end = min(end, time.monotonic() + 2.0)  # SIGTERM: SIGKILL follows
            raise
        finally:
            if self._lent is not None:
                self._lent.close(max(0.5, end - time.monotonic()))
        if self._scheduler is not None:
            self._scheduler.close()


def _choose_policy(transfer: Any, ours: str) -> None:
    """The engine reads its policy after our constructor; a missing block is no reason to fail."""
    theirs = transfer.kv_load_failure_policy
    if theirs == ours:
        return
    if theirs != "fail":  # that is vLLM's default, so nobody may have chosen it
        problems = Problems()
        problems.add(
            "kv_connector_extra_config.load_failure_policy",
            ours,
            f"{theirs!r}, as kv_load_failure_policy says, or one of the two left out",
        )
        problems.raise_if_any("kvprism")
    transfer.kv_load_failure_policy = ours
    logger.info(
        "kvprism: what a failed load leaves out is computed (kv_load_failure_policy is %r now); "
        '"load_failure_policy": "fail" ends such requests with an error',
        ours,
    )


def _need_quiet(calls: int) -> None:
    """Caches may be registered anew in the same memory, which old calls would write over."""
    problems = Problems()
    if calls:
        problems.add("calls of Mooncake that have not ended", calls, "0")
    problems.raise_if_any("caches that are registered again")


def _refuse_what_cannot_be_right(vllm_config: Any) -> None:
    problems = Problems()
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        problems.add(
            "enable_sleep_mode",
            True,
            "False with this connector",
            "the cache's memory is registered with Mooncake and may not be unmapped",
        )
    parallel = vllm_config.parallel_config
    if getattr(parallel, "enable_fault_tolerance", False):
        problems.add(
            "enable_fault_tolerance",
            True,
            "False with this connector",
            "vLLM tells that a step was computed without some experts after it was saved",
        )
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        problems.add(
            "distributed_executor_backend",
            "external_launcher",
            "an executor that gathers what all ranks tell, such as mp",
            f"each of {parallel.world_size} schedulers would hear of its own rank only",
        )
    problems.raise_if_any("kvprism")
