"""Copies of a process that has imported vLLM: the import costs more than an engine's start.

Orders come over the socket on fd 3, each with four descriptors: stdin, log, answer, and where the
process id and, at the end, the exit status are told, a line each. An order names the script that
the copy runs and variables of its environment. A copy ends with its keeper, a keeper with this
process, and this process with its socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_IMPORTED = (
    "vllm",
    "vllm.v1.worker.cpu.shm",  # placeholders for torch.cuda.Event
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.qwen3_next",
    "kvprism.vllm",
)


def main() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    # Workers of their own processes are copies as well; vLLM would let each import all anew.
    executor = sys.modules["vllm.v1.executor.multiproc_executor"]
    executor.get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]
    gc.freeze()  # an engine collects garbage five times as it starts
    # Threads are not copied: whoever had one would wait for it.
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads after the imports"
    orders = socket.socket(fileno=3)
    script = serve(orders)
    if script is not None:
        importlib.import_module(script).main()


def serve(orders: socket.socket) -> str | None:
    """The script to run, in a copy; None when no order will come."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    here = os.getpid()
    prctl = ctypes.CDLL(None).prctl

    def end_with(parent: int) -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, 1 << 16, 4)
        if not message:
            return None
        if os.fork() == 0:
            end_with(here)
            orders.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            keeper = os.getpid()
            engine = os.fork()
            if engine == 0:
                end_with(keeper)
                return begin(json.loads(message), descriptors)
            keep(engine, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def keep(engine: int, descriptors: list[int]) -> None:
    """Tells of a copy's begin and end, and never returns.

    Until the one who is told hangs up, the copy keeps its number: a signal finds nobody else.
    """
    *others, told = descriptors
    for descriptor in (0, 1, 2, *others):
        os.close(descriptor)
    os.write(told, b"%d\n" % engine)
    ended = os.waitid(os.P_PID, engine, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    exited = ended.si_code == os.CLD_EXITED
    with contextlib.suppress(BrokenPipeError):
        os.write(told, b"%d\n" % (ended.si_status if exited else -ended.si_status))
        listener = select.poll()
        listener.register(told, 0)  # only that nobody reads any more
        listener.poll()
    os._exit(0)


def begin(order: dict[str, Any], descriptors: list[int]) -> str:
    """Makes a copy look like a process of its own."""
    stdin, log, answer, _ = descriptors
    # Whatever numbers they have: none may be overwritten before it is used.
    high = [os.dup2(each, 100 + at) for at, each in enumerate((stdin, log, log, answer))]
    for each in descriptors:
        os.close(each)
    for number, each in enumerate(high):
        os.dup2(each, number, inheritable=True)
        os.close(each)
    os.environ.update(order["environment"])
    script = Path(order["script"])
    sys.argv = [str(script)]
    return script.stem


if __name__ == "__main__":
    main()
