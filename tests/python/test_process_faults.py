"""Processes that are killed, stopped, started at once or left: with a real Mooncake."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import kvprism
import pytest
from children import Children
from kvprism.local_mooncake import LocalMooncake
from mooncake_helpers import TARGETS, Engine, prompt
from process_scripts import SimulatedEngine, simulated_prompts

pytestmark = pytest.mark.mooncake

INSTANCES = 16
EXITS = 2  # of each kind; `make soak` has a hundred


@pytest.fixture
def children() -> Iterator[Children]:
    """Whatever becomes of the test, its processes end."""
    owned = Children()
    try:
        yield owned
    finally:
        owned.end()


def test_many_instances_on_one_host(children: Children) -> None:
    """All make their clients at once (R70) and then work at once."""
    with LocalMooncake(storage_bytes=64 << 20) as mooncake:
        instances = [children.start("store_and_load", mooncake, str(i)) for i in range(INSTANCES)]
        for instance in instances:
            instance.says("ready")
        for instance in instances:
            instance.go_on()
        assert [instance.ends_well() for instance in instances] == ["right"] * INSTANCES


def test_a_worker_that_is_killed_in_the_middle_of_a_save(children: Children) -> None:
    """What it began is a miss, and the next writer stores it (R46)."""
    flags = {"put_start_discard_timeout_sec": 1, "put_start_release_timeout_sec": 2}
    with LocalMooncake(storage_bytes=64 << 20, master_flags=flags) as mooncake:
        worker = children.start("save_and_hang", mooncake, "7")
        worker.says("ready")
        mooncake.pause_storage()
        worker.go_on()
        worker.says("saving")
        worker.end()
        mooncake.resume_storage()
        engine = Engine(mooncake, scheduler={"saved_fresh_for_seconds": 0.001})
        assert engine.loaded(prompt(7)) is None
        # A put of what another writer has begun is told as stored; a lookup tells when it is.
        while engine.found(prompt(7))[1] == 0:
            engine.stored(prompt(7))
            engine.worker.wait(0.1)
        assert engine.loads_right(prompt(7))
        engine.close()


def test_a_master_that_goes_between_lookup_and_load() -> None:
    with LocalMooncake(storage_bytes=64 << 20) as mooncake:
        engine = Engine(mooncake)
        assert engine.stored(prompt(1)) == 3
        request, offered = engine.found(prompt(1))
        assert offered == 12
        gets = engine.store.counters()["get_calls"]
        mooncake.stop_master()
        assert engine.scheduler.allocated(request, offered, [TARGETS]) is not None
        engine.step()
        (end,) = engine.scheduler.take_load_ends()
        assert not end.complete
        assert end.valid_tokens == 0
        assert end.blocks_quiet
        assert engine.store.counters()["get_calls"] <= gets + 1, "nobody asks it again"
        engine.scheduler.finished(request)
        assert engine.holds_nothing()
        assert engine.scheduler.health() == "healthy"
        engine.scheduler.end_step()
        assert engine.scheduler.health().startswith("degraded: ")
        engine.close()


def test_storage_that_stops_and_goes_on() -> None:
    """A load waits, no byte is wrong, and the client stays (bytes and calls counted)."""
    with LocalMooncake(storage_bytes=64 << 20) as mooncake:
        engine = Engine(mooncake)
        assert engine.stored(prompt(1)) == 3
        before = engine.store.counters()
        request, offered = engine.found(prompt(1))
        engine.memory[:, TARGETS] = 0
        assert engine.scheduler.allocated(request, offered, [TARGETS]) is not None
        mooncake.pause_storage()
        assert engine.worker.submit(engine.scheduler.end_step(), kvprism.ReadyToken.host())
        assert engine.worker.wait(1.0) is None
        assert engine.worker.counters()["jobs_alive"] == 1
        mooncake.resume_storage()
        engine.settle()
        (end,) = engine.scheduler.take_load_ends()
        assert end.complete
        assert (engine.memory[:, TARGETS] == engine.memory[:, [3, 1, 7]]).all()
        after = engine.store.counters()
        assert after["get_calls"] == before["get_calls"] + 1
        assert after["get_bytes"] - before["get_bytes"] == engine.memory[:, TARGETS].nbytes
        assert after["replacements"] == 0
        engine.scheduler.finished(request)
        assert engine.holds_nothing()
        engine.close()


def test_the_interpreter_ends_with_and_without_close(children: Children) -> None:
    with LocalMooncake(storage_bytes=64 << 20) as mooncake:
        processes = [children.start("leave", mooncake, how) for how in ("close", "open") * EXITS]
        for process in processes:
            process.ends_well()


def test_signals_are_the_process_own(children: Children) -> None:
    with LocalMooncake(storage_bytes=64 << 20) as mooncake:
        assert children.start("signals", mooncake).ends_well() == "right"


def test_an_engine_that_is_terminated_with_saves_in_flight(children: Children) -> None:
    """It ends within its bound, and its successor loads only what is right (bytes compared)."""
    flags = {"put_start_discard_timeout_sec": 1, "put_start_release_timeout_sec": 2}
    with LocalMooncake(storage_bytes=256 << 20, master_flags=flags) as mooncake:
        engine = children.start("serve", mooncake)
        engine.says("ready")
        mooncake.pause_storage()
        engine.go_on()
        engine.says("saving")
        engine.process.send_signal(signal.SIGTERM)
        # Its close may take a second, while the storage process says nothing.
        assert engine.line() == "unquiet"
        # Mooncake waits up to a minute for a storage process that says nothing.
        engine.ends_well(180.0)
        mooncake.resume_storage()

        successor = SimulatedEngine(mooncake.master)
        prompts = simulated_prompts()
        tokens = 0
        rounds = 0
        # What was half-written is a miss until the master lets go of it; then it is stored anew.
        while tokens < sum(len(prompt) // 64 * 64 for prompt in prompts):
            assert rounds < 200, successor.engine.stats()
            tokens = successor.serve(prompts)
            rounds += 1
        assert successor.engine.check() == ""
        stats = successor.engine.stats()
        assert stats["bytes_verified"] > 0
        assert stats["bytes_mismatched"] == 0
        assert successor.engine.close(10.0) == 0


@contextmanager
def ticking() -> Iterator[list[float]]:
    """A thread that wants to run every 10 ms."""
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield ticks
    finally:
        stop.set()
        thread.join()


def test_long_calls_leave_the_interpreter_to_others() -> None:
    """While a call of two seconds runs, a thread gets most of its turns (R72)."""
    with LocalMooncake(storage_bytes=64 << 20) as mooncake:
        engine = Engine(mooncake)
        assert engine.stored(prompt(1)) == 3
        with ticking() as ticks:
            begin = time.monotonic()
            assert engine.worker.wait(2.0) is None
            length = time.monotonic() - begin
        # Against the longest standstill, as a busy machine slows every tick: a call that keeps the
        # lock leaves one gap of its whole length.
        gaps = [b - a for a, b in zip([begin, *ticks], [*ticks, begin + length], strict=True)]
        assert max(gaps) < length / 2, max(gaps)
        engine.close()
