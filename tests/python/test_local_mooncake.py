"""Real servers start on ports of their own, and nothing of them is left."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from kvprism.local_mooncake import LocalMooncake, LocalMooncakeError, open_local, port_accepts

pytestmark = pytest.mark.mooncake


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_distribution_that_python_finds_is_found(tmp_path: Path) -> None:
    """Wherever it was installed, e.g. with `pip install --target`."""
    information = tmp_path / "mooncake_transfer_engine-0.0.0.dist-info"
    information.mkdir()
    (information / "RECORD").write_text("mooncake/store.so,,\n")
    (tmp_path / "mooncake").mkdir()
    library = tmp_path / "mooncake" / "store.so"
    library.write_bytes(b"")
    done = subprocess.run(
        [sys.executable, "-c", "import kvprism; print(kvprism.find_mooncake_library())"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == str(library)


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


class Answering(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, *_: object) -> None:
        pass


def test_a_url_of_this_machine_needs_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose network is behind a proxy rarely says that loopback is not."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with http.server.HTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with open_local(f"http://127.0.0.1:{server.server_port}/keys", timeout=10) as answer:
            assert answer.read() == b"/keys"
        thread.join(10)
    assert not thread.is_alive()


def test_nothing_else_opens_urls() -> None:
    root = Path(__file__).resolve().parents[2]
    asking = [
        path.name
        for folder in ("python", "tests", "examples", "benchmarks")
        for path in (root / folder).rglob("*.py")
        if "url" + "open(" in path.read_text("utf-8")
    ]
    assert asking == []
