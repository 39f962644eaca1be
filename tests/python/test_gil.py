"""Calls that wait, scan or copy let other Python threads run meanwhile."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import configs
import kvprism
import numpy as np
import numpy.typing as npt
import pytest
from kvprism import sim
from store_helpers import Rank, hashes, schema


class Ticker:
    """A thread that would like to run every millisecond, and notes the longest it could not."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._last = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _tick(self) -> None:
        now = time.monotonic()
        self.longest = max(self.longest, now - self._last)
        self._last = now

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            self._tick()

    def __enter__(self) -> Ticker:
        self._last = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._tick()


def lets_others_run(call: Callable[[], object], at_least: float) -> None:
    """A call that holds the GIL makes a gap of its own length; a busy machine may, once."""
    gaps = []
    for _ in range(3):
        with Ticker() as ticker:
            begin = time.monotonic()
            call()
            length = time.monotonic() - begin
        assert length > at_least, "too short to tell anything"
        if ticker.longest < length / 2:
            return
        gaps.append((ticker.longest, length))
    pytest.fail(f"other threads stood still for (gap, call): {gaps}")


class BigEngine:
    """An engine whose steps take a while."""

    def __init__(self) -> None:
        group = configs.attention(layers=[f"f{i}" for i in range(32)], block_size=64)
        groups = kvprism.Projection(
            kvprism.CacheConfig.from_dict(configs.config(group, num_blocks=200))
        )
        store = kvprism.memory_store()
        keys = schema(groups)
        memory = sim.SimMemory(groups)
        self.engine = sim.Engine(
            kvprism.StoreScheduler(keys, store, saves=False),
            kvprism.StoreWorker(keys, memory.segment_map(), store),
            memory,
            local_cache=False,
            token_budget=1 << 16,
        )
        self.next = 1

    def submit(self, tokens: int, output: int = 1) -> None:
        self.engine.submit(self.next, np.full(tokens, self.next), output)
        self.next += 1


def test_a_call_that_holds_the_gil_is_noticed() -> None:
    numbers = range(5_000_000)
    with pytest.raises(pytest.fail.Exception, match="stood still"):
        lets_others_run(lambda: sum(numbers), 0.01)


def test_a_wait_for_reports() -> None:
    rank = Rank()
    lets_others_run(lambda: rank.worker.wait(0.5), 0.4)


def test_running_an_engine() -> None:
    big = BigEngine()

    def run() -> None:
        for _ in range(4):
            big.submit(10_000)
        assert big.engine.run_until_idle(60.0)

    lets_others_run(run, 0.02)
    assert big.engine.close() == 0


def test_one_step_and_a_look_at_everything() -> None:
    big = BigEngine()

    def step() -> None:
        big.submit(12_000)
        while big.engine.unfinished():
            big.engine.step()

    lets_others_run(step, 0.01)
    big.submit(12_000, 500)
    while big.engine.stats()["generated_tokens"] < 4:
        big.engine.step()
    lets_others_run(big.engine.verify_all, 0.002)


def test_end_of_a_step_with_many_lookups() -> None:
    rank = Rank()
    tokens = list(range(200_000))
    digests = np.frombuffer(b"".join(hashes(tokens)), dtype=np.uint8).reshape(-1, 32)

    def look() -> None:
        for request in range(20):
            rank.scheduler.lookup(request, len(tokens), digests)
        rank.scheduler.end_step()
        for request in range(20):
            rank.scheduler.finished(request)

    lets_others_run(look, 0.01)


class LongPrompt:
    """A request of many blocks of 4 tokens, and memory for all of them."""

    def __init__(self, blocks: int, **options: object) -> None:
        self.blocks = blocks
        group = configs.attention(
            layers=["f0"], block_size=4, num_kv_heads=1, head_size=8, dtype="float16"
        )
        groups = kvprism.Projection(
            kvprism.CacheConfig.from_dict(configs.config(group, num_blocks=blocks + 1))
        )
        page = groups.groups()[0].page_size_bytes
        self.memory: npt.NDArray[np.uint8] = np.zeros((blocks + 1) * page, dtype=np.uint8)
        tensor = kvprism.CacheTensor(
            self.memory, layers=["f0"], layer_stride=self.memory.size, block_stride=page
        )
        self.keys = schema(groups)
        self.map = kvprism.SegmentMap(groups, [tensor])
        self.store = kvprism.memory_store()
        self.scheduler = kvprism.StoreScheduler(self.keys, self.store, **options)  # type: ignore[arg-type]
        self.tokens = 4 * blocks
        self.hashes = np.random.default_rng(1).integers(256, size=(blocks, 32), dtype=np.uint8)
        self.rows = [np.arange(1, blocks + 1, dtype=np.int32)]

    def advance(self, request: int = 1) -> None:
        self.scheduler.advanced(request, self.tokens, self.hashes)

    def save(self, request: int = 1) -> None:
        self.scheduler.save(request, (0, self.tokens), self.rows)


def test_hashes_and_blocks_of_a_long_prompt() -> None:
    prompt = LongPrompt(1_600_000)
    requests = iter(range(1, 100))
    lets_others_run(lambda: prompt.advance(next(requests)), 0.002)
    saved = iter(range(1, 100))
    lets_others_run(lambda: prompt.save(next(saved)), 0.01)
    prompt.scheduler.set_mode("off")


def test_the_plan_of_a_long_prompt() -> None:
    prompt = LongPrompt(800_000)
    prompt.advance()
    prompt.save()
    plan = prompt.scheduler.end_step()
    workers = [
        kvprism.StoreWorker(prompt.keys, prompt.map, kvprism.memory_store()) for _ in range(3)
    ]
    unused = iter(workers)
    lets_others_run(lambda: next(unused).submit(plan, kvprism.ReadyToken.host()), 0.002)
    for worker in workers:
        worker.close(0.0)


def test_a_recorded_step(tmp_path: Path) -> None:
    prompt = LongPrompt(800_000, record_to=str(tmp_path / "run"))
    requests = iter(range(1, 100))
    lets_others_run(lambda: prompt.advance(next(requests)), 0.01)


def test_a_recorded_call_that_does_nothing_else(tmp_path: Path) -> None:
    """Its record is written to a file, which may take as long as a disk does."""
    scheduler = Rank(record_to=str(tmp_path / "run")).scheduler
    turns = 0
    stop = threading.Event()

    def run() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            time.sleep(0)

    thread = threading.Thread(target=run)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # others run only where they are let
    try:
        thread.start()
        for call in (
            lambda: scheduler.finished(7),
            lambda: scheduler.preempted(7),
            lambda: scheduler.wants_save(7),
            lambda: scheduler.restrict(7, load=False),
            lambda: scheduler.set_mode("off"),
        ):
            seen = turns
            end = time.monotonic() + 10.0
            while turns == seen:
                assert time.monotonic() < end
                call()
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


def test_the_registration_of_memory() -> None:
    rank = Rank()
    memory = np.zeros(rank.memory.shape, dtype=np.uint8)
    tensor = kvprism.CacheTensor(
        memory, layers=["f0", "f1"], layer_stride=memory.nbytes // 2, block_stride=memory.shape[2]
    )
    segments = kvprism.SegmentMap(rank.projection, [tensor])
    workers: list[kvprism.StoreWorker] = []

    def register() -> None:
        while workers:
            workers.pop().close()
        store = kvprism.inject_faults(kvprism.memory_store(), region_delay_seconds=0.5)
        workers.append(kvprism.StoreWorker(rank.schema, segments, store))

    lets_others_run(register, 0.4)
    assert workers.pop().close() == 0
    rank.close()


def test_a_purge_of_many_objects() -> None:
    prompt = LongPrompt(100_000, saved_fresh_for_seconds=0.001)
    worker = kvprism.StoreWorker(prompt.keys, prompt.map, prompt.store)

    def fill() -> None:
        prompt.advance()
        prompt.save()
        assert worker.submit(prompt.scheduler.end_step(), kvprism.ReadyToken.host())
        while prompt.scheduler.has_pending_work():
            report = worker.wait(10.0)
            assert report is not None
            prompt.scheduler.report(report)
            prompt.scheduler.take_released()

    fill()
    assert prompt.scheduler.counters()["saved_objects"] == prompt.blocks
    prompt.scheduler.purge()
    lets_others_run(prompt.scheduler.end_step, 0.01)
    worker.close()


def interrupted(call: Callable[[], object]) -> float:
    """Seconds until a call notices Ctrl-C, which comes soon after it has begun."""
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    begin = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    timer.join()
    return time.monotonic() - begin


def test_ctrl_c_ends_a_wait() -> None:
    rank = Rank()
    assert interrupted(lambda: rank.worker.wait(60.0)) < 20


def test_ctrl_c_ends_a_run() -> None:
    big = BigEngine()
    for _ in range(1000):
        big.submit(10_000)
    assert interrupted(lambda: big.engine.run_until_idle(60.0)) < 20
    assert big.engine.unfinished() > 0
    # The engine can go on.
    big.engine.step()
