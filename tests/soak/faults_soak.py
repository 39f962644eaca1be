"""Long faults with real processes: a network that is cut, storage that stops, a hundred exits.

Each case prints one line with what it has counted; the exit status is 0 only if all held. Needs
root, for network namespaces.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "python"
sys.path.insert(0, str(TESTS))

import kvprism  # noqa: E402
from children import BOUND_SECONDS, Children  # noqa: E402
from kvprism.local_mooncake import LocalMooncake  # noqa: E402
from mooncake_helpers import SOURCES, TARGETS, Engine, hashes, prompt  # noqa: E402
from records import record  # noqa: E402
from store_helpers import BLOCK  # noqa: E402

CLONE_NEWNET = 0x40000000
CUT_SECONDS = 70.0  # Mooncake gives up after 60
IN_FLIGHT_SECONDS = 2.0
# The client waits for a minute, and its tear-down for what is left of the cut.
QUIET_SECONDS = 180.0
EXITS = 100  # with close, and as many without
EXIT_SECONDS = 20.0  # a quiet machine takes less than two
AT_ONCE = 2


def set_loopback(state: str) -> None:
    """Of this process's own network, in which there is nothing else."""
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


def enter_network() -> None:
    """A network of our own, so that cutting it concerns nobody else."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET), as root only")
    set_loopback("up")


def drain(engine: Engine, begin: float) -> float:
    """Steps until no job is alive; how long that took."""
    while engine.scheduler.counters()["ledger"]["alive"]:
        assert time.monotonic() - begin < BOUND_SECONDS, engine.scheduler.flight_record(40)
        engine.scheduler.end_step()
        report = engine.worker.wait(0.2)
        if report is not None:
            engine.scheduler.report(report)
    engine.scheduler.take_acquired()
    engine.scheduler.take_released()
    return time.monotonic() - begin


def wait(seconds: float, engine: Engine) -> None:
    """Goes on stepping, as an engine does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        engine.scheduler.end_step()
        report = engine.worker.wait(0.2)
        if report is not None:
            engine.scheduler.report(report)


def works_again(engine: Engine, number: int) -> float:
    """Until a prompt is stored and comes back right; how long that took."""
    begin = time.monotonic()
    while True:
        assert time.monotonic() - begin < BOUND_SECONDS, engine.scheduler.health()
        engine.end = time.monotonic() + BOUND_SECONDS
        number += 1
        if engine.stored(prompt(number)) == 3 and engine.loads_right(prompt(number)):
            return time.monotonic() - begin
        engine.worker.wait(0.5)


def content(engine: Engine, tokens: list[int], saved: Any) -> str:
    """What the store has of a prompt: "right" or "absent", compared with what was saved."""
    end = engine.loaded(tokens)
    if end is None or end.valid_tokens == 0:
        return "absent"
    right = engine.memory[:, TARGETS] == saved
    whole = end.valid_tokens // BLOCK
    assert right[:, :whole].all(), f"of {end.valid_tokens} tokens some bytes are others"
    return "right" if end.complete else f"right for {end.valid_tokens} tokens"


def until(what: str, holds: Callable[[], bool], engine: Engine) -> None:
    """Steps until something holds."""
    end = time.monotonic() + BOUND_SECONDS
    while not holds():
        assert time.monotonic() < end, f"never {what}: {engine.store.counters()}"
        engine.scheduler.end_step()
        report = engine.worker.wait(0.01)
        if report is not None:
            engine.scheduler.report(report)


def interrupted(
    cut: Callable[[LocalMooncake], None], mend: Callable[[LocalMooncake], None], load: bool
) -> dict[str, Any]:
    """A load or a save over which something is away for longer than Mooncake waits.

    The storage process is stopped when the call is made, so that bytes are in flight when the cut
    comes, and goes on behind it: it cannot have sent or taken them before.
    """
    with LocalMooncake(storage_bytes=64 << 20) as mooncake:
        engine = Engine(
            mooncake, scheduler={"load_timeout_seconds": 20.0, "saved_fresh_for_seconds": 0.001}
        )
        assert engine.stored(prompt(1)) == 3
        tokens, guard = prompt(2), engine.memory.copy()
        if load:
            request, offered = engine.found(prompt(1))
            engine.memory[:, TARGETS] = 0
            assert engine.scheduler.allocated(request, offered, [TARGETS]) is not None
        else:
            request = engine.request()
            engine.scheduler.advanced(request, len(tokens), hashes(tokens))
            span = engine.scheduler.wants_save(request)
            assert span is not None
            engine.scheduler.save(request, span, [SOURCES])
        plan = engine.scheduler.end_step()
        kind = "get" if load else "put"
        before = engine.store.counters()
        mooncake.pause_storage()
        begin = time.monotonic()
        assert engine.worker.submit(plan, kvprism.ReadyToken.host())
        until(
            f"a {kind} in flight",
            lambda: engine.store.counters()[f"{kind}_calls"] == before[f"{kind}_calls"] + 1,
            engine,
        )
        wait(IN_FLIGHT_SECONDS, engine)  # past the master, on the way to the storage process
        cut(mooncake)
        try:
            if cut is not LocalMooncake.pause_storage:
                mooncake.resume_storage()
            wait(CUT_SECONDS, engine)
        finally:
            mend(mooncake)  # the cases that follow need it
        quiet_after = drain(engine, begin)
        after = engine.store.counters()
        assert after[f"{kind}_calls"] == before[f"{kind}_calls"] + 1, "it was tried again"
        assert after[f"{kind}_bytes"] == before[f"{kind}_bytes"], "told as moved"
        left = sum(after[name] - before[name] for name in ("unquiet_calls", "stuck_calls"))
        assert left == 1, f"no byte was in flight: {after}"
        assert IN_FLIGHT_SECONDS < quiet_after < QUIET_SECONDS, quiet_after
        ends = engine.scheduler.take_load_ends()
        counters = engine.scheduler.counters()
        if load:
            (end,) = ends
            assert end.blocks_quiet
            assert not end.complete
            assert counters["loads_failed"] == 1
            right = bool((engine.memory[:, TARGETS] == guard[:, SOURCES]).all())
            assert right or end.valid_tokens == 0, "told as valid, and the bytes are others"
        # Nothing may write to what was given back.
        others = [b for b in range(guard.shape[1]) if b not in TARGETS]
        assert (engine.memory[:, others] == guard[:, others]).all()
        engine.scheduler.finished(request)
        saved = engine.memory[:, SOURCES].copy()
        if not load:
            engine.memory[:, SOURCES] ^= 0xFF  # who reads them from now on stores other bytes
        # Before and after the store works again: late bytes must not make it anything else.
        stored = [content(engine, tokens, saved)] if not load else []
        again_after = works_again(engine, 10)
        if not load:
            stored.append(content(engine, tokens, saved))
            engine.memory[:, SOURCES] = saved
            begin = time.monotonic()
            while engine.stored(tokens) != 3 or content(engine, tokens, saved) != "right":
                assert time.monotonic() - begin < BOUND_SECONDS, engine.scheduler.health()
                engine.end = time.monotonic() + BOUND_SECONDS
                engine.worker.wait(0.5)
        assert engine.holds_nothing()
        found = {
            "stored": stored,
            "quiet_after_seconds": round(quiet_after, 1),
            "works_again_after_seconds": round(again_after, 1),
            "ledger": counters["ledger"],
            "loads_failed": counters["loads_failed"],
            "incidents": counters["incidents"],
            "client": engine.store.counters(),
        }
        engine.worker.close(20)
        engine.scheduler.close(5)
        return found


def exits() -> dict[str, Any]:
    """The interpreter ends a hundred times with close and a hundred times without."""
    ended = {"close": 0, "open": 0}
    longest = 0.0
    with LocalMooncake(storage_bytes=64 << 20) as mooncake:
        for _ in range(0, 2 * EXITS, AT_ONCE):
            children = Children()
            try:
                ways = ("close", "open") * (AT_ONCE // 2)
                running = [(way, children.start("leave", mooncake, way)) for way in ways]
                for way, child in running:
                    child.says("leaving")
                    begin = time.monotonic()
                    child.ends_well(EXIT_SECONDS)
                    longest = max(longest, time.monotonic() - begin)
                    ended[way] += 1
            finally:
                children.end()
    assert ended == {"close": EXITS, "open": EXITS}
    return {"ended_well": ended, "longest_exit_seconds": round(longest, 2)}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "network cut during a load": lambda: interrupted(
        lambda _: set_loopback("down"), lambda _: set_loopback("up"), True
    ),
    "network cut during a save": lambda: interrupted(
        lambda _: set_loopback("down"), lambda _: set_loopback("up"), False
    ),
    "storage stopped during a load": lambda: interrupted(
        LocalMooncake.pause_storage, LocalMooncake.resume_storage, True
    ),
    "storage stopped during a save": lambda: interrupted(
        LocalMooncake.pause_storage, LocalMooncake.resume_storage, False
    ),
    "exits": exits,
}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(CASES))
    args = parser.parse_args()
    if os.geteuid() != 0:
        print("faults_soak: needs root, for a network of its own that it can cut", file=sys.stderr)
        return 2
    enter_network()
    failed = 0
    figures = {}
    for name, case in CASES.items():
        if args.only not in (None, name):
            continue
        begin = time.monotonic()
        try:
            found = case()
        except Exception as error:
            failed += 1
            figures[name] = {"error": str(error)}
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
            continue
        found["seconds"] = round(time.monotonic() - begin, 1)
        figures[name] = found
        print(f"{name}: {json.dumps(found)}", flush=True)
    print(f"{failed} failed")
    record("soak-faults", failed=failed, cases=figures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
