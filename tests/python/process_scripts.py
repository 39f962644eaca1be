"""Programs that the tests of faults run in processes of their own: NAME MASTER [ARGUMENT]."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

import configs
import kvprism
import numpy as np
import numpy.typing as npt
from kvprism import sim
from mooncake_helpers import BOUND, SOURCES, Engine, hashes, prompt


class Elsewhere:
    """A server that another process has started."""

    def __init__(self, master: str) -> None:
        self.master = master


class SimulatedEngine:
    """A whole engine with a hybrid cache on a Mooncake, which knows what every byte must be."""

    def __init__(self, master: str) -> None:
        window = configs.attention(
            kind="sliding_window", layers=["w0", "w1"], block_size=64, sliding_window=128
        )
        full = configs.attention(layers=["f0", "f1"], block_size=64)
        groups = kvprism.Projection(
            kvprism.CacheConfig.from_dict(
                configs.config(full, configs.ring(), window, num_blocks=200)
            )
        )
        schema = kvprism.KeySchema.kvprism(
            groups, model="terminated", hash_algorithm="simulated", hash_is_stable=True
        )
        self.store = kvprism.mooncake_store(master=master)
        memory = sim.SimMemory(groups, shadow=True)
        # What is hit is loaded, and what was stored is saved again: a put tells which is there.
        self.engine = sim.Engine(
            kvprism.StoreScheduler(
                schema, self.store, saved_fresh_for_seconds=0.001, backoff_after=10_000
            ),
            kvprism.StoreWorker(schema, memory.segment_map(), self.store),
            memory,
            local_cache=False,
        )
        self.requests = 0

    def submit(self, prompts: list[npt.NDArray[np.uint32]]) -> None:
        for tokens in prompts:
            self.requests += 1
            self.engine.submit(self.requests, tokens, 2)

    def serve(self, prompts: list[npt.NDArray[np.uint32]]) -> int:
        """Serves prompts to their end; how many of their tokens came from the store."""
        self.submit(prompts)
        assert self.engine.run_until_idle(BOUND), self.engine.describe()
        return sum(request.external_hit_tokens for request in self.engine.take_finished())


def simulated_prompts() -> list[npt.NDArray[np.uint32]]:
    """Four, each of nine blocks and a rest that is left to compute."""
    random = np.random.default_rng(11)
    return [random.integers(1 << 16, size=9 * 64 + 17, dtype=np.uint32) for _ in range(4)]


def serve(master: str) -> None:
    """Serves until it is terminated, which begins when its saves are in flight."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    served = SimulatedEngine(master)
    print("ready", flush=True)
    sys.stdin.readline()
    served.submit(simulated_prompts())
    told = False
    try:
        while True:
            served.engine.run_until_idle(0.01)
            if not told and served.store.counters()["put_calls"]:
                told = True
                print("saving", flush=True)
    finally:
        print("unquiet" if served.engine.close(1.0) else "quiet", flush=True)


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


def lend_and_wait(master: str, metadata_server: str) -> None:
    """Lends memory that is found through a service, stores in it, and waits to be ended."""
    engine = Engine(
        Elsewhere(master),  # type: ignore[arg-type]
        metadata_server=metadata_server,
        global_segment_size=16 << 20,
    )
    assert engine.stored(prompt(1)) == 3
    print("stored", flush=True)
    sys.stdin.readline()


def lend(master: str) -> None:
    """Lends memory and waits to be ended."""
    store = kvprism.mooncake_store(master=master, global_segment_size=64 << 20)
    print("lent", flush=True)
    sys.stdin.readline()
    store.close()


def leave(master: str, how: str) -> None:
    """Ends with open connections and a load behind it, after `close` or without; tells when."""
    engine = Engine(Elsewhere(master))  # type: ignore[arg-type]
    # Of its own: what another process has begun to store is told as stored, and not there yet.
    tokens = prompt(os.getpid())
    assert engine.stored(tokens) == 3
    assert engine.loads_right(tokens)
    if how == "close":
        engine.close()
    print("leaving", flush=True)


def give_up_and_leave(master: str) -> None:
    """Ends with status 1 while the set-up that it has given up goes on; tells when."""
    # What is registered first runs last: the set-up has a second (the status) for its crash when
    # nothing that it uses is left.
    libc = ctypes.CDLL(None)
    assert libc.on_exit(libc.sleep, None) == 0
    try:
        kvprism.mooncake_store(master=master, setup_timeout_seconds=0.5)
    except kvprism.Error as error:
        print(error.code, flush=True)
    sys.stdin.readline()
    sys.exit(1)


def in_spawned_child(master: str) -> None:
    """What a process of multiprocessing does, which has imported everything anew."""
    engine = Engine(Elsewhere(master))  # type: ignore[arg-type]
    assert engine.loads_right(prompt(4))
    engine.close()


def spawn_and_fork(master: str) -> None:
    """Children of a process with open connections, which go on being right."""
    engine = Engine(Elsewhere(master))  # type: ignore[arg-type]
    assert engine.stored(prompt(4)) == 3
    for method, target, arguments in (
        ("spawn", in_spawned_child, (master,)),
        ("fork", os.getpid, ()),
    ):
        child = multiprocessing.get_context(method).Process(target=target, args=arguments)
        child.start()
        child.join(BOUND)
        assert child.exitcode == 0, method
        assert engine.loads_right(prompt(4))
    engine.close()
    print("right", flush=True)


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
    programs = (
        serve,
        store_and_load,
        save_and_hang,
        lend_and_wait,
        lend,
        leave,
        give_up_and_leave,
        signals,
        spawn_and_fork,
    )
    {f.__name__: f for f in programs}[sys.argv[1]](*sys.argv[2:])
