"""The API server, as an operator starts it: engine and front end in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import conftest
import harness
from kvprism.local_mooncake import LocalMooncake, die_with_parent, free_port

BOUND = 600.0  # seconds for a server to come up


@contextmanager
def server(model: Path, connector: dict[str, Any]) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "tiny", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
    command += ["--block-size", "32", "--max-model-len", "4096", "--max-num-seqs", "4"]
    command += ["--enable-prefix-caching", "--kv-transfer-config", json.dumps(connector)]
    environment = {**os.environ, **harness.ENVIRONMENT}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        try:
            address = f"http://127.0.0.1:{port}"
            end = time.monotonic() + BOUND
            while not healthy(address):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise AssertionError(f"the server is not up\n{log.read()[-20000:]}")
                time.sleep(0.2)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def complete(address: str, prompt: list[int]) -> list[str]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "logprobs": 0}
    body["ignore_eos"] = True
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        content = json.load(answer)
    return list(content["choices"][0]["logprobs"]["tokens"])


def metrics(address: str) -> dict[str, float]:
    """Our own counters, as Prometheus reads them."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("vllm:kvprism_") and "_created" not in line
    }


def test_a_restarted_server_continues_from_the_store() -> None:
    path = conftest.model("llama")
    with LocalMooncake(storage_bytes=1 << 30) as mooncake:
        connector = harness.kvprism_connector(mooncake.master)
        # The name alone: vLLM knows it from our entry point.
        del connector["kv_connector_module_path"]
        asked = harness.prompts()
        with server(path, connector) as address:
            cold = [complete(address, prompt) for prompt in asked]
            end = time.monotonic() + 60
            while metrics(address).get("vllm:kvprism_saved_objects_total", 0) < 49:
                assert time.monotonic() < end, metrics(address)
                time.sleep(0.1)
        with server(path, connector) as address:
            warm = [complete(address, prompt) for prompt in asked]
            counted = metrics(address)
    assert warm == cold
    # Later prompts find their common beginning in the engine's own cache.
    assert counted["vllm:kvprism_loaded_tokens_total"] == 2432 - 3 * 288
    assert counted["vllm:kvprism_loads_failed_total"] == 0
