"""The interpreter may end while threads wait without the GIL."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

START = """
import threading, time, sys
import numpy as np
import kvprism
from kvprism import sim
from store_helpers import Rank, projection, schema

def in_a_daemon(call):
    threading.Thread(target=call, daemon=True).start()
    time.sleep(0.3)
"""


def run(text: str) -> tuple[subprocess.CompletedProcess[str], float]:
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", START + text],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done, time.monotonic() - begin


ENGINE = """
groups = projection()
store = kvprism.memory_store(latency_seconds=0.5)
memory = sim.SimMemory(groups)
names = schema(groups)
worker = kvprism.StoreWorker(names, memory.segment_map(), store)
engine = sim.Engine(kvprism.StoreScheduler(names, store), worker, memory)
engine.submit(1, np.arange(40, dtype=np.uint32), 2)
"""


@pytest.mark.parametrize(
    "text",
    [
        "rank = Rank()\nin_a_daemon(lambda: rank.worker.wait(30))",
        "rank = Rank()\nin_a_daemon(lambda: [rank.worker.poll() for _ in range(10**9)])",
        ENGINE + "in_a_daemon(lambda: engine.run_until_idle(30))",
        ENGINE + "engine.run_until_idle(0.1)\nin_a_daemon(lambda: engine.close(30))",
    ],
    ids=["wait", "poll", "run_until_idle", "close"],
)
def test_a_daemon_thread_ends_with_the_interpreter(text: str) -> None:
    done, seconds = run(text)
    assert done.returncode == 0, done.stderr
    assert "terminate" not in done.stderr
    assert "leaked" not in done.stderr
    assert seconds < 15


def test_the_exiting_thread_can_still_close() -> None:
    done, _ = run(
        "rank = Rank()\n"
        "class Last:\n"
        "    def __del__(self): print('closed', rank.worker.close())\n"
        "kvprism.last = Last()\n"
    )
    assert (done.returncode, done.stdout) == (0, "closed 0\n"), done.stderr
