"""An object of another size under one of our keys: no put replaces it, so it must go (R47)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from kvprism.local_mooncake import LocalMooncake, open_local
from mooncake_helpers import Engine, prompt

pytestmark = pytest.mark.mooncake

# In a process of its own, with Mooncake's own client.
LENGTHEN = """
import sys
import time

from mooncake.store import MooncakeDistributedStore

master, *keys = sys.argv[1:]
client = MooncakeDistributedStore()
assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
for key in keys:
    value = client.get(key)
    assert value
    while client.remove(key) != 0:  # reading it has taken a lease
        time.sleep(0.05)
    assert client.put(key, value + b"!") == 0
client.close()
"""


def keys_of(mooncake: LocalMooncake) -> list[str]:
    with open_local(f"http://{mooncake.metrics}/get_all_keys") as answer:
        return answer.read().decode().split()


def lengthen(mooncake: LocalMooncake, keys: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LENGTHEN, mooncake.master, *keys],
        env={**os.environ, "MC_FORCE_TCP": "1", "MC_TCP_BIND_ADDRESS": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_an_object_of_another_size_is_replaced() -> None:
    """The load that finds it has a lease on it, and so has whoever looks it up meanwhile."""
    flags = {"default_kv_lease_ttl": 200}
    with LocalMooncake(storage_bytes=64 << 20, master_flags=flags) as mooncake:
        # Nothing is believed again just because time has passed.
        patient = {"purge_settle_seconds": 0.5, "avoid_failed_for_seconds": 300.0}
        engine = Engine(mooncake, scheduler=patient)
        assert engine.stored(prompt(1)) == 3
        lengthen(mooncake, keys_of(mooncake))
        end = engine.loaded(prompt(1))
        assert end is not None
        assert not end.complete
        assert engine.scheduler.counters()["mismatches"] == 3
        counters = engine.scheduler.counters
        while counters()["objects_removed"] < 3:
            assert engine.loaded(prompt(1)) is None, "nobody is offered it meanwhile"
            engine.worker.wait(0.05)
        assert keys_of(mooncake) == []
        assert engine.stored(prompt(1)) == 3, "although the same prefix was saved lately"
        assert engine.loads_right(prompt(1))
        assert engine.store.counters()["replacements"] == 0
        assert engine.holds_nothing()
        engine.close()
