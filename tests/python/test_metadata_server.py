"""A metadata service beside the master, which kvprism does without unless it is told (R75)."""

from __future__ import annotations

import contextlib
import http.server
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator

import kvprism
import pytest
from children import Children
from kvprism.local_mooncake import LocalMooncake, die_with_parent, free_port, port_accepts
from mooncake_helpers import BOUND, Engine, prompt

pytestmark = pytest.mark.mooncake


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake's HTTP client obeys the environment, whose proxy knows no loopback."""
    monkeypatch.setenv("no_proxy", "*")


def has_network() -> bool:
    """Mooncake wants an address other than loopback when it is to be found through a service."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return False
        return True


@contextlib.contextmanager
def metadata_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from mooncake.http_metadata_server import main; main()",
            f"--port={port}",
            "--host=127.0.0.1",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent(),
    )
    try:
        end = time.monotonic() + BOUND
        while not port_accepts(port):
            assert process.poll() is None
            assert time.monotonic() < end
        yield f"http://127.0.0.1:{port}/metadata", process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metadata"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.skipif(not has_network(), reason="only loopback")
def test_a_service_is_used_and_may_die() -> None:
    with LocalMooncake() as mooncake, metadata_server() as (url, process):
        engine = Engine(mooncake, metadata_server=url, global_segment_size=16 << 20)
        assert engine.stored(prompt(1)) == 3
        assert engine.loads_right(prompt(1))
        # Each client lends memory; whoever first stores in another's asks the service where it is.
        for more in range(10, 20):
            assert engine.stored(prompt(more)) == 3
        process.kill()
        process.wait()
        assert engine.loads_right(prompt(1))
        assert engine.stored(prompt(2)) == 3
        engine.close()


@contextlib.contextmanager
def remembering() -> Iterator[tuple[str, dict[str, bytes]]]:
    """A service whose entries the test sees."""
    entries: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def key(self) -> str:
            return urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query)["key"][0]

        def answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:  # names of the base class
            found = entries.get(self.key())
            self.answer(404 if found is None else 200, found or b"")

        def do_PUT(self) -> None:
            entries[self.key()] = self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(200)

        def do_DELETE(self) -> None:
            self.answer(404 if entries.pop(self.key(), None) is None else 200)

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        yield url, entries


@pytest.mark.skipif(not has_network(), reason="only loopback")
def test_the_entry_of_a_dead_client_costs_a_load_and_nothing_else(children: Children) -> None:
    flags = {"client_ttl": 1}
    with LocalMooncake(master_flags=flags) as mooncake, remembering() as (url, entries):
        lender = children.start("lend_and_wait", mooncake, url)
        lender.says("stored")
        left = dict(entries)
        assert left, "it is not found through the service"
        lender.end()
        engine = Engine(
            mooncake,
            metadata_server=url,
            global_segment_size=16 << 20,
            scheduler={"saved_fresh_for_seconds": 0.001},
        )
        assert left.items() <= entries.items(), "nobody takes them away"
        end = engine.loaded(prompt(1))
        assert end is None or not end.complete
        # Until the master has noticed, a save may be sent there too.
        end = time.monotonic() + BOUND
        while engine.stored(prompt(2)) != 3:
            assert time.monotonic() < end, engine.worker.counters()
            engine.worker.wait(0.1)
        assert engine.loads_right(prompt(2))
        assert left.items() <= entries.items()
        assert engine.holds_nothing()
        engine.close()


def test_set_up_without_the_service_ends_with_an_error() -> None:
    with LocalMooncake() as mooncake, pytest.raises(kvprism.Error) as caught:
        kvprism.mooncake_store(
            master=mooncake.master, metadata_server=f"http://127.0.0.1:{free_port()}/metadata"
        )
    assert caught.value.code in ("unavailable", "timed_out")


@contextlib.contextmanager
def answering(status: int | None) -> Iterator[str]:
    """A service that answers everything with one status, or, with None, never."""
    over = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            if status is None:
                over.wait(BOUND)
                return
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_PUT = do_DELETE = do_POST = answer  # noqa: N815  # names of the base class

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        try:
            yield url
        finally:
            over.set()


@pytest.mark.parametrize("status", [404, 500, None])
def test_set_up_with_a_service_that_does_not_work_ends_with_an_error(status: int | None) -> None:
    with LocalMooncake() as mooncake, answering(status) as url:
        with pytest.raises(kvprism.Error) as caught:
            kvprism.mooncake_store(
                master=mooncake.master, metadata_server=url, setup_timeout_seconds=1.0
            )
        assert caught.value.code in ("unavailable", "timed_out")
