"""Processes that are killed, stopped, started at once or left: with a real Mooncake."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kvprism
import pytest
from kvprism.local_mooncake import LocalMooncake
from mooncake_helpers import TARGETS, Engine, prompt

pytestmark = pytest.mark.mooncake

SCRIPTS = Path(__file__).parent / "process_scripts.py"
INSTANCES = 16
EXITS = 2  # of each kind; `make soak` has a hundred


def start(name: str, mooncake: LocalMooncake, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS), name, mooncake.master, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def says(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if line != word:
        process.kill()
        raise AssertionError(f"{line!r}: {process.communicate()[1]}")


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def ends_well(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert "terminate" not in errors
    return out


def test_many_instances_on_one_host() -> None:
    """All make their clients at once (R70) and then work at once."""
    with LocalMooncake(storage_bytes=64 << 20) as mooncake:
        processes = [start("store_and_load", mooncake, str(i)) for i in range(INSTANCES)]
        for process in processes:
            says(process, "ready")
        for process in processes:
            go_on(process)
        assert [ends_well(process) for process in processes] == ["right\n"] * INSTANCES


def test_a_worker_that_is_killed_in_the_middle_of_a_save() -> None:
    """What it began is a miss, and the next writer stores it (R46)."""
    flags = {"put_start_discard_timeout_sec": 1, "put_start_release_timeout_sec": 2}
    with LocalMooncake(storage_bytes=64 << 20, master_flags=flags) as mooncake:
        process = start("save_and_hang", mooncake, "7")
        says(process, "ready")
        mooncake.pause_storage()
        go_on(process)
        says(process, "saving")
        process.kill()
        process.communicate()
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


def test_the_interpreter_ends_with_and_without_close() -> None:
    with LocalMooncake(storage_bytes=64 << 20) as mooncake:
        processes = [start("leave", mooncake, how) for how in ("close", "open") * EXITS]
        for process in processes:
            ends_well(process)


def test_signals_are_the_process_own() -> None:
    with LocalMooncake(storage_bytes=64 << 20) as mooncake:
        assert ends_well(start("signals", mooncake)) == "right\n"


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
