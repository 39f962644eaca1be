"""Programs that the tests of faults run in processes of their own: NAME MASTER [ARGUMENT]."""

from __future__ import annotations

import os
import signal
import sys

import kvprism
from mooncake_helpers import SOURCES, Engine, hashes, prompt


class Elsewhere:
    """A server that another process has started."""

    def __init__(self, master: str) -> None:
        self.master = master


def store_and_load(master: str, number: str) -> None:
    """One instance among many: everything it stores comes back right."""
    engine = Engine(Elsewhere(master))  # type: ignore[arg-type]
    print("ready", flush=True)
    sys.stdin.readline()
    tokens = prompt(100 + int(number))
    assert engine.stored(tokens) == 3
    assert engine.loads_right(tokens)
    assert engine.holds_nothing()
    engine.close()
    print("right", flush=True)


def save_and_hang(master: str, number: str) -> None:
    """Begins a save and tells so; whoever started it ends it in the middle."""
    engine = Engine(Elsewhere(master))  # type: ignore[arg-type]
    tokens, request = prompt(int(number)), engine.request()
    engine.scheduler.advanced(request, len(tokens), hashes(tokens))
    span = engine.scheduler.wants_save(request)
    assert span is not None
    engine.scheduler.save(request, span, [SOURCES])
    print("ready", flush=True)
    sys.stdin.readline()
    assert engine.worker.submit(engine.scheduler.end_step(), kvprism.ReadyToken.host())
    while not engine.store.counters()["put_calls"]:
        engine.worker.wait(0.01)
    print("saving", flush=True)
    engine.worker.wait(1000.0)


def leave(master: str, how: str) -> None:
    """Ends with open connections and a load behind it, after `close` or without."""
    engine = Engine(Elsewhere(master))  # type: ignore[arg-type]
    engine.stored(prompt(1))
    assert engine.loads_right(prompt(1))
    if how == "close":
        engine.close()


def signals(master: str) -> None:
    """A client leaves the signal mask and the handlers of the process alone."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    engine = Engine(Elsewhere(master))  # type: ignore[arg-type]
    assert engine.stored(prompt(2)) == 3
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before == set()
    os.kill(os.getpid(), signal.SIGTERM)
    assert told == [signal.SIGTERM]
    engine.close()
    print("right", flush=True)


if __name__ == "__main__":
    {f.__name__: f for f in (store_and_load, save_and_hang, leave, signals)}[sys.argv[1]](
        *sys.argv[2:]
    )
