"""The API server, as an operator starts it: engine and front end in processes of their own."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import conftest
import harness
import pytest
from kvprism.local_mooncake import LocalMooncake, die_with_parent, free_port, open_local
from test_faults import MANY, SMALL_CALLS

BOUND = 600.0  # seconds for a server to come up


def arguments(model: Path, connector: dict[str, Any] | None, port: int, *more: str) -> list[str]:
    given = ["--model", str(model), "--served-model-name", "tiny", "--port", str(port)]
    given += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
    given += ["--block-size", "32", "--max-model-len", "4096", "--enable-prefix-caching"]
    given += more
    if connector is not None:
        given += ["--kv-transfer-config", json.dumps(connector)]
    return given


def wait_until_up(address: str, ended: Callable[[], bool], log: IO[str]) -> None:
    end = time.monotonic() + BOUND
    while not healthy(address):
        if ended() or time.monotonic() > end:
            log.seek(0)
            raise AssertionError(f"the server is not up\n{log.read()[-20000:]}")
        time.sleep(0.2)


@contextmanager
def server(model: Path, connector: dict[str, Any] | None, *more: str) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    environment = {**os.environ, **harness.ENVIRONMENT}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command + arguments(model, connector, port, *more),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until_up(address, lambda: process.poll() is not None, log)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired as error:
                process.kill()
                process.wait()
                log.seek(0)
                raise AssertionError(f"it does not end\n{log.read()[-20000:]}") from error


@contextmanager
def copied_server(model: Path, connector: dict[str, Any], *more: str) -> Iterator[str]:
    """The same without its imports, which are most of its start: a copy, and so is its engine."""
    port = free_port()
    with tempfile.TemporaryFile("w+") as order, tempfile.TemporaryFile("w+") as log:
        json.dump(arguments(model, connector, port, *more), order)
        order.seek(0)
        process = harness.EngineProcess(
            harness.SCRIPT.with_name("server_run.py"),
            *(order.fileno(), log.fileno(), log.fileno()),
            {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        )
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until_up(address, process.ended, log)
            yield address
        finally:
            process.kill(signal.SIGTERM)
            try:
                process.wait(60)
            except TimeoutError as error:
                log.seek(0)
                raise AssertionError(f"it does not end\n{log.read()[-20000:]}") from error


def healthy(address: str) -> bool:
    try:
        with open_local(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def body_of(prompt: list[int], salt: str = "") -> bytes:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "logprobs": 0}
    body |= {"ignore_eos": True} | ({"cache_salt": salt} if salt else {})
    return json.dumps(body).encode()


JSON = {"Content-Type": "application/json"}


def complete(address: str, prompt: list[int], salt: str = "") -> list[str]:
    request = urllib.request.Request(f"{address}/v1/completions", body_of(prompt, salt), JSON)
    with open_local(request, timeout=120) as answer:
        content = json.load(answer)
    return list(content["choices"][0]["logprobs"]["tokens"])


@contextmanager
def asking(address: str, prompt: list[int]) -> Iterator[http.client.HTTPConnection]:
    """A question whose answer nobody may wait for: the connection is closed in the end."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=120)
    connection.request("POST", "/v1/completions", body_of(prompt), JSON)
    try:
        yield connection
    finally:
        connection.close()


def metrics(address: str, beginning: str = "vllm:kvprism_", label: str = "") -> dict[str, float]:
    """Counters as Prometheus reads them, those of several labels added up.

    Args:
        address: Of the server.
        beginning: Of their names.
        label: Only those that have it.
    """
    with open_local(f"{address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith(beginning) and "_created" not in line and label in line:
            name = line.split("{")[0]
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def answered(address: str) -> float:
    """Requests that came to their end, which an aborted one does not."""
    found = metrics(address, "vllm:request_success_total", 'finished_reason="length"')
    return sum(found.values())


def test_a_restarted_server_continues_from_the_store() -> None:
    path = conftest.model("llama")
    with LocalMooncake(storage_bytes=1 << 30) as mooncake:
        connector = harness.kvprism_connector(mooncake.master)
        # The name alone: vLLM knows it from our entry point.
        del connector["kv_connector_module_path"]
        asked = harness.prompts()
        with copied_server(path, connector, "--max-num-seqs", "4") as address:
            cold = [complete(address, prompt) for prompt in asked]
            end = time.monotonic() + 60
            while metrics(address).get("vllm:kvprism_saved_objects_total", 0) < 49:
                assert time.monotonic() < end, metrics(address)
                time.sleep(0.1)
        with copied_server(path, connector, "--max-num-seqs", "4") as address:
            warm = [complete(address, prompt) for prompt in asked]
            counted = metrics(address)
    assert warm == cold
    # Later prompts find their common beginning in the engine's own cache.
    assert counted["vllm:kvprism_loaded_tokens_total"] == 2432 - 3 * 288
    assert counted["vllm:kvprism_loads_failed_total"] == 0


@pytest.mark.parametrize("start", [copied_server, pytest.param(server, marks=pytest.mark.soak)])
def test_a_server_is_terminated_while_it_saves(start: Any) -> None:
    """While one prompt is saved and the next computed; the next server goes on from there."""
    path = conftest.model("llama")
    asked = harness.prompts(**MANY)
    with LocalMooncake(storage_bytes=1 << 30) as mooncake:
        slow = harness.kvprism_connector(mooncake.master, **SMALL_CALLS)
        with start(path, slow, "--max-num-seqs", "1") as address, ExitStack() as stack:
            first, *_ = [stack.enter_context(asking(address, prompt)) for prompt in asked]
            assert first.getresponse().status == 200
            saved = metrics(address).get("vllm:kvprism_saved_objects_total", 0)
        assert saved < sum(len(prompt) // 32 for prompt in asked)
        with start(path, harness.kvprism_connector(mooncake.master)) as address:
            warm = [complete(address, prompt) for prompt in asked]
            counted = metrics(address)
            cold = [complete(address, prompt, "another's") for prompt in asked]
            again = metrics(address)
    assert warm == cold
    assert counted["vllm:kvprism_loads_failed_total"] == 0
    # A block that ends its prompt is computed.
    last = sum(len(prompt) % 32 == 0 for prompt in asked)
    assert counted["vllm:kvprism_loaded_tokens_total"] >= 32 * (saved - last)
    # Under the other salt nothing was stored.
    tokens = "vllm:kvprism_loaded_tokens_total"
    assert again[tokens] == counted[tokens]


CHATS, ABORTED = 200, 40
# The tiny vocabulary is words w0 to w511.
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def chats() -> list[list[dict[str, str]]]:
    """Ten long beginnings, each continued in twenty ways."""
    begins = [harness.prompts(seed=100 + n, prefix=0, suffixes=(320,))[0] for n in range(10)]
    ends = harness.prompts(seed=99, prefix=0, suffixes=(24,) * CHATS)

    def words(tokens: list[int]) -> str:
        return " ".join(f"w{token}" for token in tokens)

    return [
        [
            {"role": "system", "content": words(begins[n % 10])},
            {"role": "user", "content": words(ends[n])},
        ]
        for n in range(CHATS)
    ]


def chat(address: str, messages: list[dict[str, str]], *, give_up: bool = False) -> str:
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
    body |= {"ignore_eos": True, "stream": give_up}
    if give_up:
        body["max_tokens"] = 512  # so that it is not over before
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), JSON
    )
    with open_local(request, timeout=600) as answer:
        if give_up:  # closes the connection, which aborts the request
            return ""
        return str(json.load(answer)["choices"][0]["message"]["content"])


def all_at_once(address: str) -> list[str]:
    """The answers to all chats, while others of the same beginnings are aborted."""
    asked = chats()
    given_up = [
        [begin, end | {"content": " ".join(reversed(end["content"].split()))}]
        for begin, end in asked[:ABORTED]
    ]
    with ThreadPoolExecutor(CHATS + ABORTED) as pool:
        aborted = [pool.submit(chat, address, messages, give_up=True) for messages in given_up]
        answers = [pool.submit(chat, address, messages) for messages in asked]
        for one in aborted:
            one.result()
        return [one.result() for one in answers]


@pytest.mark.soak
def test_two_hundred_chats_at_once(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    options = ("--chat-template", str(template), "--max-num-seqs", "32")
    path = conftest.model("llama")
    with server(path, None, *options) as address:
        expected = all_at_once(address)
    assert len(set(expected)) > CHATS // 2
    with LocalMooncake(storage_bytes=1 << 30) as mooncake:
        connector = harness.kvprism_connector(mooncake.master)
        found = []
        for _ in range(2):
            with server(path, connector, *options) as address:
                before = metrics(address)
                assert all_at_once(address) == expected
                assert CHATS <= answered(address) <= CHATS + ABORTED // 4
                after = metrics(address)
                found.append({name: after[name] - before.get(name, 0) for name in after})
    cold, warm = found
    assert cold["vllm:kvprism_saved_objects_total"] > 0
    assert warm["vllm:kvprism_loaded_tokens_total"] >= 10 * 320, found
    for run in found:
        assert run["vllm:kvprism_loads_failed_total"] == 0
        assert run["vllm:kvprism_save_chunks_failed_total"] == 0
        assert run["vllm:kvprism_quarantined_total"] == 0
