"""Real servers start on ports of their own, and nothing of them is left."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from kvprism.local_mooncake import LocalMooncake, LocalMooncakeError, port_accepts

pytestmark = pytest.mark.mooncake


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_master_and_storage_come_and_go() -> None:
    with LocalMooncake(storage_bytes=64 << 20) as mooncake:
        assert port_accepts(mooncake.master_port)
        assert mooncake.master_port < 32768
        pid = mooncake.storage_pid
        assert pid is not None
        assert runs(pid)
        mooncake.pause_storage()
        mooncake.resume_storage()
        assert "mooncake_master" in mooncake.log
        port = mooncake.master_port
    assert not port_accepts(port)
    assert not runs(pid)
    mooncake.close()


def test_paused_storage_is_ended_too() -> None:
    with LocalMooncake(storage_bytes=64 << 20) as mooncake:
        pid = mooncake.storage_pid
        assert pid is not None
        mooncake.pause_storage()
    assert not runs(pid)


def test_master_comes_back_on_its_port() -> None:
    with LocalMooncake() as mooncake:
        address = mooncake.master
        mooncake.stop_master()
        assert not port_accepts(mooncake.master_port)
        mooncake.start_master()
        assert mooncake.master == address
        assert port_accepts(mooncake.master_port)
        with pytest.raises(LocalMooncakeError):
            mooncake.start_master()


def test_failure_shows_the_log_and_leaves_nothing() -> None:
    mooncake = LocalMooncake(master_flags={"no_such_flag": 1}, start_timeout=5)
    with pytest.raises(LocalMooncakeError, match="no_such_flag"):
        mooncake.__enter__()
    assert mooncake.log == ""


def test_an_interrupted_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def interrupt(port: int) -> bool:
        asked.append(port)
        raise KeyboardInterrupt

    mooncake = LocalMooncake()
    with monkeypatch.context() as patch:
        patch.setattr("kvprism.local_mooncake.port_accepts", interrupt)
        with pytest.raises(KeyboardInterrupt):
            mooncake.__enter__()
    # Whoever listened later than this could still be there.
    assert asked
    needle = f"-rpc_port={asked[0]}".encode()
    for commandline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert needle not in commandline.read_bytes()
        except OSError:  # it has ended
            continue


# R70: many at once on one machine have different ports.
def test_many_at_once() -> None:
    masters = [LocalMooncake() for _ in range(8)]
    threads = [threading.Thread(target=master.__enter__) for master in masters]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        ports = {master.master_port for master in masters}
        assert len(ports) == len(masters)
        assert all(port_accepts(port) for port in ports)
    finally:
        for master in masters:
            master.close()
    assert not any(port_accepts(port) for port in ports)


def test_environment_of_the_test_is_untouched() -> None:
    before = dict(os.environ)
    with LocalMooncake(storage_environment={"MC_STORE_MEMCPY": "0"}, storage_bytes=64 << 20):
        pass
    assert dict(os.environ) == before
