"""The connector's half in vLLM's scheduler: hands requests and tables to a StoreScheduler."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .._core import GroupId, StoreScheduler
from ..logs import forward_log
from .arrivals import Arrivals
from .cache_config import Described, hash_generation
from .control_file import MODES, ControlFile
from .events import Announcer
from .metadata import ReportMetadata, StageMetadata, StepMetadata
from .mooncake import open_store
from .options import Options
from .own_cache import named_beyond, names
from .sibling_loads import SiblingLoads
from .stats import Differences, StoreStats

logger = logging.getLogger("vllm.kvprism")


class _Tracked:
    """A live request."""

    __slots__ = (
        "accepted",
        "blocks",
        "checked_below",
        "computed",
        "hashes",
        "last_hash",
        "limit",
        "loaded",
        "misnamed",
        "number",
        "prompt",
        "purged",
        "request",
        "step",
    )

    def __init__(self, number: int, request: Any, limit: int | None, step: int) -> None:
        self.number = number
        self.request = request
        self.limit = limit  # tokens that may be saved; None: all
        self.step = step  # the fewest tokens that may be saved
        self.prompt = request.num_prompt_tokens  # its length when it was seen last
        self.misnamed = False  # its hashes may not be those of its tokens
        self.hashes = 0  # seen so far
        self.last_hash = b""  # of those
        self.blocks: Any = None  # vLLM's own lists of them, which outlive a preemption
        self.computed: int | None = None  # tokens after the last step; None: no step yet
        self.begin()

    def begin(self) -> None:
        """The request's first token is computed next, or again."""
        self.accepted = 0
        self.checked_below = self.step  # with fewer tokens there is nothing new to save
        self.purged = False  # what it has computed is older than a purge, or may be wrong
        self.loaded = False  # a load was begun for it

    def may_save(self) -> bool:
        limited = self.limit is not None and self.limit < self.step
        return not (self.purged or self.misnamed or limited)

    def has_changed(self) -> bool:
        """Whether tokens that were seen before are others now, as a streaming session does it."""
        hashes = self.request.block_hashes
        if self.hashes and (len(hashes) < self.hashes or hashes[self.hashes - 1] != self.last_hash):
            return True
        self.hashes = len(hashes)
        self.last_hash = hashes[-1] if hashes else b""
        return False


def _cuts_hashes() -> bool:
    """Whether a streaming session that discards its last token discards its hash as well."""
    from vllm.v1.core.sched.scheduler import Scheduler

    update = getattr(Scheduler, "_update_request_as_session", None)
    # A version without sessions has nothing to cut; another one's method must know of hashes.
    return update is None or "block_hashes" in update.__code__.co_names


def _flat(tables: Iterable[list[int]]) -> list[int]:
    return [block for blocks in tables for block in blocks]


class SchedulerSide:
    """Translates; every decision is the StoreScheduler's. One thread, vLLM's scheduler."""

    def __init__(
        self,
        described: Described,
        options: Options,
        *,
        loads: bool,
        saves: bool,
        takes_back: bool = False,
        announcer: Announcer | None = None,
        stages: tuple[StageMetadata, ...] = (),
    ) -> None:
        self._save_decode = bool(options.save_decode_cache)
        self._loads = loads
        self._saves = saves
        # vLLM may preempt a request that it has scheduled in the same step.
        self._takes_back = saves and takes_back
        self._step_tokens = described.projection.scheduler_block_size
        # Hits may end inside a block, and so may what is saved of a prompt.
        self._hit_tokens = described.projection.hit_alignment
        self._fine = self._hit_tokens < self._step_tokens
        self._groups = [GroupId(gid) for gid in range(described.projection.num_groups)]
        self._announcer = announcer
        self._store = open_store(options)
        self._options = options
        self._described = described
        self._pool: Any = None
        self._requests: dict[str, _Tracked] = {}
        self._next_number = 1
        self._saving: dict[str, _Tracked] = {}  # those that may still have something to save
        self._loading: dict[int, str] = {}  # job to request, until the load has ended
        self._step_loads: list[tuple[int, str]] = []
        self._refused: list[str] = []
        self._abandoned: list[int] = []
        self._step = 0  # the number of the last one
        self._arrivals = Arrivals()
        self._siblings = SiblingLoads()
        self._begun: dict[str, Any] = {}  # requests let in since the last step, and their blocks
        self._differences = Differences()
        self._stirred = False  # the counters may have changed
        self._purging = False
        self._cuts_hashes = _cuts_hashes()
        self._names_adapters_alone = hash_generation() == "plain"
        self._cache_misnamed = False
        self._fresh_since = 0  # the first step since a reset has emptied vLLM's own cache
        self._stages = stages  # of several: told with the next step
        self._heard = stages
        if not stages:
            _ = self._core  # what is wrong with it is told at start
        self._health: str | None = None  # told last; None: nothing yet
        self._mode = MODES[0]
        self._control = ControlFile(options.control_file) if options.control_file else None

    @functools.cached_property
    def _core(self) -> StoreScheduler:
        options = self._options
        return StoreScheduler(
            self._described.schema,
            self._store,
            loads=self._loads,
            saves=self._saves,
            lookup_timeout_seconds=options.lookup_timeout_seconds,
            load_timeout_seconds=options.load_timeout_seconds,
            save_timeout_seconds=options.save_timeout_seconds,
            quarantine_after_seconds=options.quarantine_after_seconds,
            # vLLM gives a request whose load has failed other blocks.
            detach_quarantined_loads=True,
            backoff_after=options.backoff_after,
            backoff_seconds=options.backoff_seconds,
            saved_fresh_for_seconds=options.saved_fresh_for_seconds,
            max_held_percent=options.max_held_percent,
            tell_changes=self._announcer is not None,
            purge_settle_seconds=options.purge_settle_seconds,
        )

    def learn(self, described: Described, stages: tuple[StageMetadata, ...]) -> None:
        """Takes what all pipeline stages hold; vLLM may repeat it."""
        if "_core" in self.__dict__:
            if stages == self._heard and described.facts == self._described.facts:
                return
            if self._requests or self.pending_work() or self._purge_runs():
                logger.error(
                    "kvprism: the pipeline stages were told of anew while requests or jobs are "
                    "under way: what they were before is kept"
                )
                return
            store = open_store(self._options)
            self._core.close(0.5)  # and the store before it
            del self._core
            self._store = store
            self._differences.begin_again()
            self._health = None
        self._described = described
        self._stages = self._heard = stages
        self._core.set_mode(self._mode)

    def bind_pool(self, pool: Any) -> None:
        """Takes the block pool whose references keep the blocks of jobs."""
        self._pool = pool

    # What vLLM calls while it schedules.

    def lookup(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens the store has beyond the local ones; None: ask in the next step."""
        tracked = self._requests.get(request.request_id)
        if (
            tracked is not None
            and (tracked.purged or tracked.loaded)
            and request.num_computed_tokens == local_tokens == 0
        ):
            # Its load was of no use, or overtaken by a reset: it is computed from its first token.
            self._begin_again(tracked)
        if not self._loads or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        self._stirred = True
        number = self._number(request)
        found = self._core.lookup(number, request.num_tokens, request.block_hashes, local_tokens)
        if self._saves and request.num_tokens != request.num_prompt_tokens:
            # What is saved ends with the prompt, also of a request that has answered already (D14).
            self._core.prompt(number, request.num_prompt_tokens)
        return found, bool(found)

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """The request has blocks; it waits for a load when there are external tokens."""
        number = self._number(request)
        if self._saves:
            self._begun[request.request_id] = blocks
        tracked = self._requests[request.request_id]
        tracked.blocks, tracked.computed = blocks, None
        if external_tokens == 0:
            self._core.allocated(number, 0, ())
            return
        job = self._core.allocated(number, external_tokens, blocks.get_block_ids())
        self._reference()
        if job is None:
            # vLLM waits all the same, for whatever reason the offer is gone.
            self._refused.append(request.request_id)
            return
        tracked.loaded = True
        self._loading[job] = request.request_id
        self._step_loads.append((job, request.request_id))

    def end_step(self, output: Any) -> StepMetadata:
        """Plans the step's saves and hands over its jobs."""
        if self._control is not None and (mode := self._control.take()) is not None:
            self._set_mode(mode)
        for request_id in getattr(output, "preempted_req_ids", None) or ():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                if self._takes_back and request_id not in output.num_scheduled_tokens:
                    self._forget_uncomputed(tracked)
                self._begin_again(tracked)
        if self._takes_back:
            self._note_computed(output.num_scheduled_tokens)
        self._step += 1
        state = output.kv_connector_block_state
        self._hold_back(output, state)
        if state is not None and self._may_save():
            self._save_positional(output.num_scheduled_tokens, state)
            if state.boundary_state_offloads:
                self._save_states(state.boundary_state_offloads)
        plan = self._core.end_step()
        forward_log(logger)
        self._stirred |= bool(plan)
        self._take_load_ends()
        self._reference()
        self._release()
        loads, refused = tuple(self._step_loads), tuple(self._refused)
        abandoned = tuple(self._abandoned)
        waiting = (*(request for _, request in loads), *refused)
        answers = self._arrivals.send(
            self._step,
            waiting,
            abandoned,
            awaited=self._siblings.awaited,
            computed=output.num_scheduled_tokens if self._saves else (),
        )
        metadata = StepMetadata(
            plan.encode() if plan else b"",
            loads,
            refused,
            abandoned,
            self._stages,
            self._fresh_since,
            self._step,
            *answers,
        )
        self._stages = ()
        self._step_loads.clear()
        self._refused.clear()
        self._abandoned.clear()
        return metadata

    def _note_computed(self, scheduled: Mapping[str, int]) -> None:
        for name, tokens in scheduled.items():
            if (tracked := self._requests.get(name)) is not None:
                request = tracked.request
                tracked.computed = min(request.num_computed_tokens + tokens, request.num_tokens)

    def _forget_uncomputed(self, tracked: _Tracked) -> None:
        """vLLM names blocks when it schedules, and lets the next step find them also where it has
        taken the request out of this one."""
        if tracked.computed is not None:
            hashes, tables = tracked.request.block_hashes, tracked.blocks.blocks
            self._pool.evict_blocks(named_beyond(self._pool, hashes, tables, tracked.computed))

    def _hold_back(self, output: Any, state: Any) -> None:
        """What may rest on a load that another child does in this step is not saved with it."""
        inside = output.has_sync_kv_loads
        if not self._saves or state is None or not (inside or self._siblings):
            self._begun.clear()
            return

        def table(name: str) -> list[int]:
            return _flat(state.get_block_ids(name) or ())

        # Also those that wait for a load, which may rest on what vLLM's own cache has.
        begun = {
            name: [*_flat(blocks.get_block_ids()), *table(name)]
            for name, blocks in self._begun.items()
            if name in self._requests and self._requests[name].request.num_computed_tokens
        }
        self._begun.clear()
        self._siblings.step(self._step, inside, begun, table)

    def _refuse(self, refused: list[str], spoiled: set[int]) -> None:
        """What rests on a load that failed, before vLLM schedules again."""
        for name in refused:
            if (tracked := self._requests.get(name)) is not None:
                tracked.purged = True
                self._saving.pop(name, None)
        if spoiled:
            # vLLM lets everybody find them before they are computed again.
            self._pool.evict_blocks(spoiled)

    def _set_mode(self, mode: str) -> None:
        self._mode = mode
        self._core.set_mode(mode)
        self._stirred = True
        logger.warning("kvprism: control_file sets the mode %s", mode)

    def _begin_again(self, tracked: _Tracked) -> None:
        self._core.preempted(tracked.number)
        tracked.begin()
        self._watch(tracked)

    def _watch(self, tracked: _Tracked) -> None:
        if self._saves and tracked.may_save():
            self._saving[tracked.request.request_id] = tracked

    def _may_save(self) -> bool:
        return self._saves and not self._cache_misnamed and not self._purge_runs()

    def _purge_runs(self) -> bool:
        """Whether nothing is saved now: what is computed meanwhile is saved afterwards."""
        if self._purging:
            self._purging = self._core.purge_status()["state"] != "done"
        return self._purging

    def _save_positional(self, scheduled: Mapping[str, int], state: Any) -> None:
        full, changed = [], []
        # Neither a long queue of waiting requests nor many that decode may cost anything here.
        few, many = sorted((scheduled, self._saving), key=len)
        for request_id in [name for name in few if name in many]:
            if request_id in self._siblings:
                continue  # asked again in a later step
            saving, tokens = self._saving[request_id], scheduled[request_id]
            request = saving.request
            if saving.has_changed():
                changed.append(request)
                continue
            # Draft tokens are counted in `tokens` and are not part of the request yet.
            accepted = min(request.num_computed_tokens + tokens, request.num_tokens)
            if saving.limit is not None:
                accepted = min(accepted, saving.limit)
            if accepted < saving.checked_below:
                continue
            self._advance(saving, accepted)
            wanted = self._core.wants_save(saving.number)
            if wanted is not None:
                self._core.save(saving.number, wanted, state.get_block_ids(request_id))
            elif self._core.saves_paused():
                break  # all of them are asked again in the next step
            reached = accepted - accepted % self._step_tokens
            saving.checked_below = reached + self._step_tokens
            if self._fine and accepted < request.num_prompt_tokens:
                saving.checked_below = min(saving.checked_below, request.num_prompt_tokens)
            if saving.limit is not None and saving.checked_below > saving.limit:
                full.append(request_id)
        for request_id in full:
            # A long decode of many requests then costs nothing here.
            del self._saving[request_id]
        for request in changed:
            self._number(request)

    def _advance(self, tracked: _Tracked, accepted: int) -> None:
        tracked.accepted = accepted
        hashes = tracked.request.block_hashes
        known = self._core.known_hashes(tracked.number)
        fresh = hashes[known:] if len(hashes) > known else None
        self._core.advanced(tracked.number, accepted, fresh, known if fresh else 0)

    def _save_states(self, offers: Mapping[str, list[tuple[int, int, int]]]) -> None:
        for request_id, states in offers.items():
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.purged or tracked.has_changed():
                continue
            if request_id in self._siblings:
                continue
            self._advance(tracked, tracked.accepted)
            for group, block, tokens in states:
                if tokens % self._hit_tokens:
                    continue  # beside a ring vLLM's own hits may end where those of a store do not
                if tracked.limit is not None and tokens > tracked.limit:
                    continue
                # An offer of between two steps may have lost its block in the second (R05).
                if names(self._pool, tracked.request.block_hashes, group, block, tokens):
                    self._core.boundary(tracked.number, self._groups[group], block, tokens)

    def save_last_states(
        self, request: Any, tables: tuple[list[int], ...], offers: list[tuple[int, int, int]]
    ) -> None:
        """States that a request leaves behind when it ends, before its blocks are free, and what it
        has computed before them: without it they would serve nobody."""
        if not self._may_save() or request.request_id in self._siblings:
            return
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.purged or tracked.has_changed():
            return
        computed = request.num_computed_tokens
        self._advance(tracked, computed if tracked.limit is None else min(computed, tracked.limit))
        wanted = self._core.wants_save(tracked.number)
        if wanted is not None:
            self._core.save(tracked.number, wanted, tables)
        self._save_states({request.request_id: offers})
        self._reference()

    # The life of a request.

    def new_request(self, request: Any) -> None:
        """A request has come."""
        self._number(request)

    def finished(self, request: Any) -> None:
        """The request is over, its blocks are still there."""
        self._saving.pop(request.request_id, None)
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        if self._announcer is not None:
            self._announcer.finish(tracked.number)
        status = getattr(request.status, "name", "")
        self._core.finished(tracked.number, status == "FINISHED_ABORTED")

    def _number(self, request: Any) -> int:
        """The StoreScheduler's number of a request: another one when its tokens are others."""
        before = self._requests.get(request.request_id)
        # Other tokens, but the same blocks: what is in them is as old as it was.
        purged = before is not None and before.purged and request.num_computed_tokens > 0
        tracked = before if before is not None and before.request is request else None
        grown = tracked is not None and request.num_prompt_tokens > tracked.prompt
        misnamed = tracked is not None and (tracked.misnamed or (grown and not self._cuts_hashes))
        if before is not None and (tracked is None or tracked.has_changed()):
            self._core.finished(before.number)
            if self._announcer is not None:
                self._announcer.finish(before.number)
            tracked = None
        if tracked is None:
            tracked = self._track(request, purged=purged, misnamed=misnamed)
            if before is not None and before.request is request:
                tracked.blocks, tracked.computed = before.blocks, before.computed
        elif grown:
            self._grow(tracked, misnamed=misnamed)
        return tracked.number

    def _track(self, request: Any, *, purged: bool, misnamed: bool) -> _Tracked:
        limit = None if self._save_decode else request.num_prompt_tokens
        step = self._step_tokens
        if self._fine:
            step = min(step, request.num_prompt_tokens)
        tracked = _Tracked(self._next_number, request, limit, step)
        self._next_number += 1
        if self._announcer is not None:
            self._announcer.begin(tracked.number, request)
        tracked.purged = purged
        tracked.has_changed()
        self._requests[request.request_id] = tracked
        self._restrict(tracked)
        if self._saves:
            self._core.prompt(tracked.number, request.num_prompt_tokens)
        self._saving.pop(request.request_id, None)
        if misnamed:
            self._misname(tracked)
        self._watch(tracked)
        return tracked

    def _grow(self, tracked: _Tracked, *, misnamed: bool) -> None:
        """A streaming session has got more of its prompt."""
        tracked.prompt = tracked.request.num_prompt_tokens
        if misnamed:
            self._misname(tracked)
            return
        if self._saves:
            self._core.prompt(tracked.number, tracked.prompt)
        if tracked.limit is not None:
            tracked.limit = tracked.prompt
        if self._fine:
            tracked.checked_below = min(tracked.checked_below, tracked.prompt)
        self._watch(tracked)

    def _misname(self, tracked: _Tracked) -> None:
        """vLLM 0.30 and 0.31 leave a session the hash of the token that it discards.

        Its blocks then have names of other tokens, in vLLM's own cache as well, so that whatever
        rests on that may be wrong: nothing is saved before the caches are reset.
        """
        self._keep_out(tracked)
        if not self._cache_misnamed:
            self._cache_misnamed = True
            logger.error(
                "kvprism: this version of vLLM gives the tokens of a streaming session wrong "
                "hashes, and caches its blocks under them: nothing is saved any more before "
                "reset_prefix_cache with reset_connector; vLLM 0.32 does it right"
            )

    def _keep_out(self, tracked: _Tracked) -> None:
        tracked.misnamed = True
        self._core.restrict(tracked.number, load=False, save=False)
        self._saving.pop(tracked.request.request_id, None)

    def _lose(self, step: int, requests: Collection[str]) -> None:
        """vLLM never gets a token of that step, and where it schedules ahead, puts those of later
        steps in its place: blocks then have names of other tokens, in vLLM's own cache as well."""
        alive = [tracked for name in requests if (tracked := self._requests.get(name)) is not None]
        for tracked in alive:
            self._keep_out(tracked)
        if (step < self._fresh_since and not alive) or self._cache_misnamed:
            return
        self._cache_misnamed = True
        logger.error(
            "kvprism: the output of a step is lost, and vLLM may take tokens for others from then "
            "on: nothing is saved any more before the requests of that time have ended, and "
            "reset_prefix_cache with reset_connector after that"
        )

    def _restrict(self, tracked: _Tracked) -> None:
        """A client may keep its request out: kv_transfer_params {"kvprism": {"save": false}}."""
        if self._names_adapters_alone and tracked.request.lora_request is not None:
            # Another path under the same name would be other bytes.
            self._core.restrict(tracked.number, load=False, save=False)
            return
        parameters = getattr(tracked.request, "kv_transfer_params", None)
        wish = parameters.get("kvprism") if isinstance(parameters, Mapping) else None
        if not isinstance(wish, Mapping):
            return
        # Whoever says anything but yes wants to be kept out.
        load, save = (wish.get(word, True) is True for word in ("load", "save"))
        if not (load and save):
            self._core.restrict(tracked.number, load=load, save=save)

    # What comes back.

    def take_output(self, output: Any) -> None:
        """Takes in what workers have told."""
        metadata = output.kv_connector_worker_meta
        if isinstance(metadata, ReportMetadata):
            heard = bool(metadata.reports or self._siblings)  # most steps tell of their end alone
            if self._siblings and metadata.ends:
                step = min(end.step for end in metadata.ends)
                self._refuse(*self._siblings.ended(step, output.invalid_block_ids or ()))
            if heard:
                self._stirred = True
                self._core.report(metadata.reports)
                self._take_load_ends()
                self._reference()
                self._release()
            # Last: after an exception vLLM has not counted the ends of loads in this output.
            for lost, requests in self._arrivals.take(metadata.ends).items():
                self._lose(lost, requests)

    def _take_load_ends(self) -> None:
        for end in self._core.take_load_ends():
            request_id = self._loading.pop(end.job, None)
            planned_now = (end.job, request_id)
            if not end.complete and planned_now in self._step_loads:
                # The core could not plan it, so no worker will ever tell of it.
                self._step_loads.remove(planned_now)
                self._refused.append(planned_now[1])
            elif not end.blocks_quiet:
                logger.warning(
                    "kvprism: a load of request %s is still in use by Mooncake; the request gets "
                    "other blocks",
                    request_id,
                )
                self._abandoned.append(end.job)

    def pending_work(self) -> bool:
        """Whether the engine must keep stepping."""
        untold = self._refused or self._abandoned or self._arrivals.pending
        return bool(untold) or self._core.has_pending_work()

    def take_events(self) -> list[Any]:
        """What the store has gained and lost since the last call, when somebody listens."""
        return [] if self._announcer is None else self._announcer.take(self._core)

    def counters(self) -> dict[str, int | dict[str, int]]:
        """The StoreScheduler's counters."""
        return self._core.counters()

    def take_stats(self) -> StoreStats | None:
        """What has been counted since the last call, where something may have been."""
        # Health also becomes better by time alone.
        health = self._core.health()
        if not self._stirred and self._health == health:
            return None
        self._health = health
        self._stirred = self._core.has_pending_work()
        now = self._core.counters() | {
            "mode": MODES.index(self._core.mode),
            "index": self._store.counters(),
            "durations": self._core.durations(),
        }
        return self._differences.take(now)

    def purge(self) -> None:
        """Removes this model's objects; the store is not used before that is done."""
        self._stirred = True
        self._purging = True
        # vLLM empties its own cache only if nobody has a block, and such a request fills it again.
        pool = self._pool
        kept = pool is not None and pool.get_num_free_blocks() + 1 != pool.num_gpu_blocks
        if not kept:
            self._fresh_since = self._step + 1
        misnamed = any(tracked.misnamed for tracked in self._requests.values())
        self._cache_misnamed = self._cache_misnamed and (kept or misnamed)
        waiting = set(self._loading.values())
        for request_id, tracked in self._requests.items():
            computed = tracked.request.num_computed_tokens
            if request_id not in waiting:  # those count by themselves
                if computed == 0:
                    continue
                # The core knows of no token that it was not told of.
                self._core.advanced(tracked.number, computed)
            tracked.purged = True
            self._saving.pop(request_id, None)
        if self._announcer is not None:
            self._announcer.clear()
        self._core.purge()
        self._take_load_ends()

    def close(self) -> None:
        """Ends lookups; may be repeated."""
        if self._control is not None:
            self._control.close()
        if "_core" not in self.__dict__:  # the stages were never told of
            self._store.close(0.5)
            return
        if self._purge_runs():
            logger.warning(
                "kvprism: closed while a purge was %s: objects of before it may be in the store",
                self._core.purge_status()["state"],
            )
            self._purging = False
        self._core.close(0.5)

    # References of jobs on blocks.

    def _reference(self) -> None:
        ids = self._core.take_acquired()
        if len(ids):
            blocks = self._pool.blocks
            self._pool.touch([blocks[block] for block in ids])

    def _release(self) -> None:
        ids = self._core.take_released()
        if len(ids):
            blocks = self._pool.blocks
            # The end of a prefix is the first that may go.
            self._pool.free_blocks([blocks[block] for block in reversed(ids)])
