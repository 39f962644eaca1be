"""A real Mooncake on this machine's loopback: for tests, demonstrations and first steps."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPResponse
from pathlib import Path
from types import TracebackType
from typing import cast

from ._core import UnavailableError
from .mooncake_wheel import InstalledMooncake, find_installed_mooncake

# Below the range from which the kernel gives out ports of its own (R70).
_FIRST_PORT, _LAST_PORT = 20000, 32000
_PAUSE_SECONDS = 30.0
_ATTEMPTS = 5
_LOCAL_HTTP_SECONDS = 60.0

# The transfer engine would otherwise look for other transports.
_ENVIRONMENT = {
    "MC_FORCE_TCP": "1",
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    "MC_TCP_ENABLE_CONNECTION_POOL": "true",
}


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> Callable[[], None] | None:
    """For ``preexec_fn``: the kernel kills the child when this process ends in whatever way.

    None outside the main thread: the kernel would kill the child when that thread ends.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    # Looked up here: between fork and exec nothing may be imported.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def set_up() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        # The parent may have ended before.
        if os.getppid() != parent:
            os._exit(1)

    return set_up


class LocalMooncakeError(UnavailableError):
    """A server did not start; the message has its log."""


def free_port() -> int:
    """A port of this machine that nobody listens on at the moment.

    Raises:
        LocalMooncakeError: There is none in the range.
    """
    for port in random.sample(range(_FIRST_PORT, _LAST_PORT), 200):
        with socket.socket() as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                candidate.bind(("", port))
                return port
    raise LocalMooncakeError(f"no free port between {_FIRST_PORT} and {_LAST_PORT}")


def port_accepts(port: int, host: str = "127.0.0.1", timeout: float = 1.0) -> bool:
    """True when a connection to the port is accepted within the timeout (seconds)."""
    try:
        socket.create_connection((host, port), timeout).close()
    except OSError:
        return False
    return True


def open_local(
    url: str | urllib.request.Request, timeout: float = _LOCAL_HTTP_SECONDS
) -> HTTPResponse:
    """Opens a URL of this machine. Proxies are for others, whatever the environment says.

    Args:
        url: Of an HTTP server here.
        timeout: Seconds that it may be silent.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return cast(HTTPResponse, direct.open(url, timeout=timeout))


class LocalMooncake:
    """A ``mooncake_master``, and a storage process if bytes are given to it, while the block runs.

    Every process listens on free ports below 32768 and is ended on exit; nothing else is. The
    transfer engine of a storage process listens on all addresses, whatever it is told: where that
    matters, run in a network namespace of your own.

    Args:
        storage_bytes: Size of the pool in a storage process of its own; 0 starts none, and objects
            live in the clients that give a segment.
        master_flags: Flags of ``mooncake_master`` without the dash, e.g.
            ``{"default_kv_lease_ttl": 100}``.
        storage_environment: Variables of the storage process, beside those for TCP.
        start_timeout: Seconds for each process to accept connections.
        installed: Which Mooncake; the installed one when None.

    Example:
        with LocalMooncake(storage_bytes=64 << 20) as mooncake:
            store = kvprism.mooncake_store(master=mooncake.master)
    """

    def __init__(
        self,
        *,
        storage_bytes: int = 0,
        master_flags: Mapping[str, str | int] | None = None,
        storage_environment: Mapping[str, str] | None = None,
        start_timeout: float = 10.0,
        installed: InstalledMooncake | None = None,
    ) -> None:
        self._storage_bytes = storage_bytes
        self._master_flags = dict(master_flags or {})
        self._storage_environment = dict(storage_environment or {})
        self._start_timeout = start_timeout
        self._installed = installed
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._master: subprocess.Popen[bytes] | None = None
        self._storage: subprocess.Popen[bytes] | None = None
        self._master_port = 0
        self._metrics_port = 0
        self._storage_port = 0

    def __enter__(self) -> LocalMooncake:
        if self._folder is not None:
            raise LocalMooncakeError("already running")
        if self._installed is None:
            self._installed = find_installed_mooncake()
        if self._installed is None:
            raise LocalMooncakeError(
                "Mooncake is not installed: "
                "pip install mooncake-transfer-engine-non-cuda==0.3.13.post1"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="kvprism-mooncake-")
        try:
            self._start_on_free_ports()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def master(self) -> str:
        """Address of the master, as host:port."""
        return f"127.0.0.1:{self._master_port}"

    @property
    def master_port(self) -> int:
        """Port of the master."""
        return self._master_port

    @property
    def metrics(self) -> str:
        """Address of the master's HTTP port, as host:port; it tells keys, segments and metrics."""
        return f"127.0.0.1:{self._metrics_port}"

    @property
    def storage_pid(self) -> int | None:
        """Process id of the storage process, or None."""
        return None if self._storage is None else self._storage.pid

    @property
    def log(self) -> str:
        """What all processes have written so far."""
        if self._folder is None:
            return ""
        parts = []
        for file in sorted(Path(self._folder.name).glob("*.log")):
            parts.append(f"--- {file.name}\n{file.read_text(errors='replace')}")
        return "\n".join(parts)

    def stop_master(self) -> None:
        """Kills the master, as a crash would."""
        _end(self._master, signal.SIGKILL)
        self._master = None

    def start_master(self) -> None:
        """Starts the master again on the same port; it has forgotten all keys.

        Raises:
            LocalMooncakeError: It did not start.
        """
        if self._master is not None:
            raise LocalMooncakeError("the master runs")
        self._start_master()

    def pause_storage(self) -> None:
        """Stops the storage process without ending it: its sockets stay open and say nothing."""
        _pause(self._storage)

    def resume_storage(self) -> None:
        """Lets a paused storage process go on."""
        _resume(self._storage)

    def pause_master(self) -> None:
        """Stops the master without ending it: it accepts connections and says nothing."""
        _pause(self._master)

    def resume_master(self) -> None:
        """Lets a paused master go on."""
        _resume(self._master)

    def stop_storage(self) -> None:
        """Kills the storage process; the objects in it are gone."""
        _end(self._storage, signal.SIGKILL)
        self._storage = None

    def close(self) -> None:
        """Ends all processes; idempotent."""
        _end(self._storage, signal.SIGTERM)
        _end(self._master, signal.SIGTERM)
        self._storage = self._master = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start_on_free_ports(self) -> None:
        # Between finding a port and using it somebody else may take it.
        for attempt in range(_ATTEMPTS):
            self._master_port, self._metrics_port = free_port(), free_port()
            try:
                self._start_master()
                break
            except LocalMooncakeError:
                if attempt == _ATTEMPTS - 1:
                    raise
        for attempt in range(_ATTEMPTS if self._storage_bytes else 0):
            self._storage_port = free_port()
            try:
                self._start_storage()
                break
            except LocalMooncakeError:
                if attempt == _ATTEMPTS - 1:
                    raise

    def _start_master(self) -> None:
        assert self._installed is not None
        flags: dict[str, str | int] = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self._master_port,
            "metrics_host": "127.0.0.1",
            "metrics_port": self._metrics_port,
            "enable_metric_reporting": "false",
            **self._master_flags,
        }
        self._master = self._start("mooncake_master", flags, {}, self._master_port)

    def _start_storage(self) -> None:
        assert self._installed is not None
        flags: dict[str, str | int] = {
            "host": "127.0.0.1",
            "port": self._storage_port,
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "master_server_address": self.master,
            "global_segment_size": self._storage_bytes,
        }
        self._storage = self._start(
            "mooncake_client", flags, self._storage_environment, self._storage_port
        )

    def _start(
        self, name: str, flags: Mapping[str, str | int], environment: Mapping[str, str], port: int
    ) -> subprocess.Popen[bytes]:
        assert self._installed is not None
        assert self._folder is not None
        log = Path(self._folder.name) / f"{name}-{port}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [
                    str(self._installed.program(name)),
                    *(f"-{flag}={value}" for flag, value in flags.items()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ENVIRONMENT, **environment},
                # A Ctrl-C in the terminal is for the program that started us.
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        end = time.monotonic() + self._start_timeout
        try:
            while time.monotonic() < end and process.poll() is None:
                if port_accepts(port):
                    return process
                time.sleep(0.01)
        except BaseException:  # a Ctrl-C: nobody else knows of the process yet
            _end(process, signal.SIGKILL)
            raise
        reason = (
            f"did not accept connections on port {port} within {self._start_timeout:g} s"
            if process.poll() is None
            else f"ended with status {process.returncode}"
        )
        _end(process, signal.SIGKILL)
        raise LocalMooncakeError(f"{name} {reason}:\n{log.read_text(errors='replace')}")


def _running(process: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes]:
    if process is None:
        raise LocalMooncakeError("there is no such process")
    return process


def _pause(process: subprocess.Popen[bytes] | None) -> None:
    """Returns when all its threads have stopped: on a busy machine some run on for a while."""
    process = _running(process)
    process.send_signal(signal.SIGSTOP)
    end = time.monotonic() + _PAUSE_SECONDS
    while not all(_has_stopped(task) for task in Path(f"/proc/{process.pid}/task").iterdir()):
        if time.monotonic() > end:
            raise LocalMooncakeError(f"process {process.pid} has not stopped")
        time.sleep(0.001)


def _has_stopped(task: Path) -> bool:
    try:
        return (task / "stat").read_text(encoding="ascii").rpartition(") ")[2][0] in "TtZX"
    except OSError:
        return True  # it has ended


def _resume(process: subprocess.Popen[bytes] | None) -> None:
    _running(process).send_signal(signal.SIGCONT)


def _end(process: subprocess.Popen[bytes] | None, number: signal.Signals) -> None:
    """Ends one process: politely first if asked to, then by force."""
    if process is None or process.poll() is not None:
        return
    process.send_signal(number)
    # A paused process sees the signal only when it goes on.
    process.send_signal(signal.SIGCONT)
    try:
        process.wait(3)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
