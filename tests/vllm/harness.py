"""Runs engines and compares what they say."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from kvprism.local_mooncake import LocalMooncake

SCRIPT = Path(__file__).with_name("engine_run.py")
# Four prompts of 2,502 tokens, 2,432 of them in whole blocks of 32.
PREFIX, SUFFIXES = 300, (316, 325, 323, 338)

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "KMP_BLOCKTIME": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
# Variables that choose another version of vLLM (versions.py).
VERSION = ("PYTHONPATH", "VLLM_TARGET_DEVICE")

_ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 16384,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "seed": 0,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
}


def prompts(
    seed: int = 1, prefix: int = PREFIX, suffixes: tuple[int, ...] = SUFFIXES
) -> list[list[int]]:
    """Prompts that share their beginning."""
    draw = random.Random(seed)
    begin = [draw.randrange(4, 512) for _ in range(prefix)]
    return [begin + [draw.randrange(4, 512) for _ in range(length)] for length in suffixes]


class EngineError(Exception):
    """An engine did not come to its end; the message has its output."""


@dataclass
class Engine:
    """What one engine shall do."""

    connector: Mapping[str, Any] | None = None
    rounds: list[list[list[int]]] = field(default_factory=lambda: [prompts()])
    reset: bool = False
    """Empty the engine's own prefix cache between rounds."""
    ring_pieces: str = ""
    """File for the beginnings of all ring rows."""


class EngineProcess:
    """A process that runs a script of engines, with files as stdin, log, and answer (its fd 3).

    It is a copy of one that has imported the version of vLLM that ``PYTHONPATH`` names.
    """

    _originals: ClassVar[dict[str, socket.socket]] = {}
    _one_at_a_time = threading.Lock()

    def __init__(
        self, script: Path, stdin: int, log: int, answer: int, environment: Mapping[str, str]
    ) -> None:
        self._told, writer = os.pipe()
        order = json.dumps({"script": str(script), "environment": dict(environment)}).encode()
        with self._one_at_a_time:
            socket.send_fds(self._original(environment), [order], [stdin, log, answer, writer])
        os.close(writer)
        self.pid = self._number(300.0)

    @classmethod
    def _original(cls, environment: Mapping[str, str]) -> socket.socket:
        version = {name: environment[name] for name in VERSION if name in environment}
        path = version.get("PYTHONPATH", "")
        if path not in cls._originals:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            script = str(SCRIPT.with_name("engine_copies.py"))
            number = theirs.fileno()
            subprocess.Popen(
                ["bash", "-c", f'exec "$@" 3>&{number}', "bash", sys.executable, script],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT, **version},
                pass_fds=(number,),
            )
            theirs.close()
            cls._originals[path] = ours
        return cls._originals[path]

    def _number(self, timeout: float) -> int:
        text = b""
        while not text.endswith(b"\n"):
            if not select.select([self._told], [], [], timeout)[0]:
                raise TimeoutError(f"no engine has begun or ended within {timeout} s")
            part = os.read(self._told, 1)
            if not part:
                raise EngineError("no engine can be started: see its output above")
            text += part
        return int(text)

    def ended(self) -> bool:
        """Whether wait() would return at once."""
        return bool(select.select([self._told], [], [], 0)[0])

    def kill(self, number: int) -> None:
        """Sends a signal, which does not matter to one that has ended; before wait() returns."""
        os.kill(self.pid, number)  # its keeper lets nobody else have the number

    def wait(self, timeout: float) -> int:
        """The exit status, or minus the signal; once."""
        try:
            return self._number(timeout)
        except TimeoutError:
            self.kill(signal.SIGKILL)
            raise
        finally:
            os.close(self._told)


def run_engines(
    model: Path,
    engines: list[Engine],
    *,
    engine: Mapping[str, Any],
    max_tokens: int = 16,
    environment: Mapping[str, str] | None = None,
    abrupt: bool = False,
    timeout: float = 900.0,
) -> list[dict[str, Any]]:
    """Runs engines one after the other in one new process."""
    task = {
        "model": str(model),
        "engine": {**_ENGINE, **engine},
        "engines": [asdict(each) for each in engines],
        "max_tokens": max_tokens,
        "abrupt": abrupt,
    }
    with (
        tempfile.TemporaryFile("w+") as order,
        tempfile.TemporaryFile("w+") as log,
        tempfile.TemporaryFile("w+") as answer,
    ):
        json.dump(task, order)
        order.seek(0)
        files = (order.fileno(), log.fileno(), answer.fileno())
        process = EngineProcess(SCRIPT, *files, environment or {})
        status = process.wait(timeout)
        log.seek(0)
        text = log.read()
        answer.seek(0)
        content = answer.read()
    if status != 0 or not content:
        raise EngineError(f"exit status {status}\n{text[-20000:]}")
    return [result | {"log": text} for result in json.loads(content)]


def tokens(result: Mapping[str, Any], round_number: int = 0) -> list[list[int]]:
    """Generated tokens of each prompt."""
    return [output["tokens"] for output in result["rounds"][round_number]["outputs"]]


def hits(result: Mapping[str, Any], round_number: int = 0) -> int:
    """Tokens that came from the store in a round."""
    return int(result["rounds"][round_number]["hits"])


def largest_logprob_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Over all tokens of all prompts of the first round."""
    return max(
        abs(a - b)
        for ours, theirs in zip(
            one["rounds"][0]["outputs"], other["rounds"][0]["outputs"], strict=True
        )
        for a, b in zip(ours["logprobs"], theirs["logprobs"], strict=True)
    )


def where_they_part(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], near_tie: float
) -> list[str]:
    """Differences of answers to the same prompts, if rounding cannot explain them.

    What follows a token that was more likely than the next by less than ``near_tie`` may differ:
    logits depend on what else is in the batch.
    """
    found = []
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if (one["finish"], other["finish"]) != ("length", "length"):
            found.append(f"prompt {number} ends with {one['finish']} and {other['finish']}")
        pairs = zip(one["tokens"], other["tokens"], strict=False)
        margins = zip(one["margins"], other["margins"], strict=False)
        for at, ((a, b), both) in enumerate(zip(pairs, margins, strict=True)):
            if min(both) < near_tie:
                break
            if a != b:
                found.append(f"prompt {number}, token {at}: {a} and {b}, clear by {both}")
                break
    return found


def patient_mooncake() -> LocalMooncake:
    """A store for a slow machine.

    By default the master lets go of what was looked up after 10 s, and a load that stood still for
    longer fails; with vLLM's own policy that ends the request with an error.
    """
    return LocalMooncake(
        storage_bytes=1 << 30, master_flags={"default_kv_lease_ttl": 600_000}, start_timeout=60.0
    )


def kvprism_connector(master: str, **options: Any) -> dict[str, Any]:
    """The kv-transfer config of this project's connector.

    A slow machine must make no difference, so a lookup has longer than by default.
    """
    options = {"lookup_timeout_seconds": 60.0} | options
    return {
        "kv_connector": "KVPrismConnector",
        "kv_connector_module_path": "kvprism.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"master_server_address": master, **options},
    }


class LiveEngine:
    """An engine in a process of its own that serves while the test does other things."""

    def __init__(
        self,
        model: Path,
        *,
        engine: Mapping[str, Any],
        connector: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        watch: Path | None = None,
        longest: float = 900.0,
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in __exit__
        reader, writer = os.pipe()
        stdin, orders = os.pipe()
        script = SCRIPT.with_name("engine_live.py")
        files = (stdin, self._log.fileno(), writer)
        self._process = EngineProcess(script, *files, environment or {})
        os.close(writer)
        os.close(stdin)
        self._orders = os.fdopen(orders, "w")
        self._answers = reader
        self._longest = longest
        self._status: int | None = None
        task = {
            "model": str(model),
            "engine": {**_ENGINE, **engine},
            "connector": connector,
            "watch": str(watch) if watch else None,
        }
        self._order(task)

    def __enter__(self) -> LiveEngine:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None and self._status is None:
                self._orders.write("\n")
                self._orders.flush()
                self._answer()
        finally:
            if self._status is None:
                self.kill(signal.SIGKILL)
            with contextlib.suppress(BrokenPipeError):
                self._orders.close()
            os.close(self._answers)
            self._log.close()

    def serve(
        self,
        prompts: list[list[int]],
        *,
        max_tokens: int = 16,
        reset: bool = False,
        abort_after: int | None = None,
        reset_running: bool = False,
        settle: bool = False,
        salt: str = "",
    ) -> dict[str, Any]:
        """Serves prompts; with ``reset``, nothing but the store can have their cache."""
        return self._order(
            {
                "prompts": prompts,
                "max_tokens": max_tokens,
                "reset": reset,
                "abort_after": abort_after,
                "reset_running": reset_running,
                "settle": settle,
                "salt": salt,
            }
        )

    def kill(self, number: int) -> int:
        """Sends a signal to the engine's process and returns its exit status."""
        self._process.kill(number)
        self._status = self._process.wait(120)
        return self._status

    @property
    def log(self) -> str:
        """What the engine has written so far."""
        self._log.seek(0)
        return self._log.read()

    def _order(self, order: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._orders.write(json.dumps(order) + "\n")
            self._orders.flush()
        except BrokenPipeError:
            pass
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self._answers], [], [], self._longest)[0]:
                raise EngineError(f"no answer within {self._longest} s\n{self.log[-20000:]}")
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise EngineError(f"the engine has ended\n{self.log[-20000:]}")
            line += part
        answer: dict[str, Any] = json.loads(line)
        return answer


def tokens_of(answer: Mapping[str, Any]) -> list[list[int]]:
    """Generated tokens of each prompt of a live engine's answer."""
    return [output["tokens"] for output in answer["outputs"]]
