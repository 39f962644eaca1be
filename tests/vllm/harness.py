"""Runs engines and compares what they say."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvprism.local_mooncake import die_with_parent

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
    with tempfile.TemporaryFile("w+") as log, tempfile.NamedTemporaryFile("r") as answer:
        process = subprocess.run(
            ["bash", "-c", 'exec "$0" "$1" 3>"$2"', sys.executable, str(SCRIPT), answer.name],
            input=json.dumps(task),
            text=True,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            timeout=timeout,
            check=False,
            preexec_fn=die_with_parent(),
        )
        log.seek(0)
        text = log.read()
        content = answer.read()
    if process.returncode != 0 or not content:
        raise EngineError(f"exit status {process.returncode}\n{text[-20000:]}")
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


def kvprism_connector(master: str, **options: Any) -> dict[str, Any]:
    """The kv-transfer config of this project's connector."""
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
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in __exit__
        reader, writer = os.pipe()
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$0" "$1" 3>&{writer}',
                sys.executable,
                str(SCRIPT.with_name("engine_live.py")),
            ],
            stdin=subprocess.PIPE,
            text=True,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            pass_fds=(writer,),
            preexec_fn=die_with_parent(),
        )
        os.close(writer)
        self._answers = os.fdopen(reader)
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
            if kind is None and self._process.poll() is None:
                assert self._process.stdin is not None
                self._process.stdin.write("\n")
                self._process.stdin.flush()
                self._answer()
        finally:
            self._process.kill()
            self._process.wait()
            self._answers.close()
            self._log.close()

    def serve(
        self,
        prompts: list[list[int]],
        *,
        max_tokens: int = 16,
        reset: bool = False,
        abort_after: int | None = None,
        settle: bool = False,
    ) -> dict[str, Any]:
        """Serves prompts; with ``reset``, nothing but the store can have their cache."""
        return self._order(
            {
                "prompts": prompts,
                "max_tokens": max_tokens,
                "reset": reset,
                "abort_after": abort_after,
                "settle": settle,
            }
        )

    def kill(self, number: int) -> int:
        """Sends a signal to the engine's process and returns its exit status."""
        self._process.send_signal(number)
        return self._process.wait(120)

    @property
    def log(self) -> str:
        """What the engine has written so far."""
        self._log.seek(0)
        return self._log.read()

    def _order(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise EngineError(f"the engine has ended\n{self.log[-20000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def tokens_of(answer: Mapping[str, Any]) -> list[list[int]]:
    """Generated tokens of each prompt of a live engine's answer."""
    return [output["tokens"] for output in answer["outputs"]]
