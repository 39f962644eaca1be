"""How long a lookup takes, when every block is in a real Mooncake: the built-in connector and ours.

Each arm is a real engine on CPU in a process of its own; the scheduler's connector is asked as
vLLM's scheduler asks it. Both ask for the same names (``key_schema`` is ``vllm``), which a plain
client has put there. Ours answers in a later step: the clock runs until it does, and the time that
the step itself is held up is told beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "vllm"))
sys.path.insert(0, str(ROOT / "benchmarks" / "vllm"))

import harness  # noqa: E402
import models  # noqa: E402
from first_token import BUILTIN, builtin_environment  # noqa: E402
from kvprism.local_mooncake import LocalMooncake, die_with_parent  # noqa: E402

BLOCK = 32


def hashes(count: int) -> list[bytes]:
    """Block hashes of a prompt that nobody has."""
    return [random.Random(at).randbytes(32) for at in range(count)]


def connector_of(llm: Any) -> tuple[Any, Any]:
    """The scheduler's connector, and the worker's."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return llm.llm_engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()


def put(worker: Any, names: list[bytes], master: str) -> None:
    """Objects under the names that the built-in connector asks for."""
    from mooncake.store import MooncakeDistributedStore
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import PoolKey

    (prefixes,) = worker.connector_worker._lookup_key_prefixes
    client = MooncakeDistributedStore()
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", master) == 0
    for prefix in prefixes:
        keys = [PoolKey.build_key_string(prefix, name.hex()) for name in names]
        for first in range(0, len(keys), 256):
            part = keys[first : first + 256]
            assert client.put_batch(part, [b"x" * 64] * len(part)) == 0
    client.close()


def ask_builtin(connector: Any, number: int, names: list[bytes]) -> tuple[float, float, int]:
    begin = time.perf_counter()
    found = connector.connector_scheduler.client.lookup(str(number), len(names) * BLOCK + 1, names)
    seconds = time.perf_counter() - begin
    return seconds, seconds, int(found.hit_length)


def ask_ours(connector: Any, number: int, names: list[bytes]) -> tuple[float, float, int]:
    core, tokens = connector._scheduler._core, len(names) * BLOCK + 1
    begin = time.perf_counter()
    found = core.lookup(number, tokens, names)
    core.end_step()
    held = time.perf_counter() - begin
    while found is None:
        time.sleep(0.0002)
        found = core.lookup(number, tokens, names)
        core.end_step()
    seconds = time.perf_counter() - begin
    core.finished(number)
    return seconds, held, int(found)


def arm(name: str, master: str, sizes: list[int], rounds: int) -> dict[str, Any]:
    """Runs in the process of one engine."""
    import vllm.v1.worker.cpu.shm  # noqa: F401  # placeholders for torch.cuda.Event
    from vllm import LLM

    connector = BUILTIN
    if name == "kvprism":
        # A late answer would be a miss.
        options = {"key_schema": "vllm", "lookup_timeout_seconds": 30.0}
        connector = harness.kvprism_connector(master, **options)
    llm = LLM(
        model=str(ROOT / "build" / "vllm-models" / "llama"),
        block_size=BLOCK,
        kv_transfer_config=connector,
        **harness._ENGINE,
    )
    scheduler, worker = connector_of(llm)
    names = hashes(max(sizes))
    if name == "built-in":
        put(worker, names, master)
    ask = ask_builtin if name == "built-in" else ask_ours
    rows = {}
    number = 1 << 40
    for size in sizes:
        answers = []
        for _ in range(rounds + 1):
            number += 1
            answers.append(ask(scheduler, number, names[:size]))
        assert {found for _, _, found in answers} == {size * BLOCK}, answers
        rows[size] = {
            "answer": statistics.median(seconds for seconds, _, _ in answers[1:]),
            "held": statistics.median(held for _, held, _ in answers[1:]),
        }
    return rows


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="2048,4096,8192,16384", help="blocks")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--master", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    if args.arm:
        rows = arm(args.arm, args.master, sizes, args.rounds)
        with os.fdopen(3, "w") as answer:
            json.dump(rows, answer)
        os._exit(0)  # the built-in connector may hang at the end

    models.build("llama", ROOT / "build" / "vllm-models")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, LocalMooncake(storage_bytes=1 << 30) as mooncake:
        environment = builtin_environment(mooncake, Path(folder))
        for name in ("built-in", "kvprism"):
            file = Path(folder) / f"{name}.json"
            command = [sys.executable, __file__, "--arm", name, "--master", mooncake.master]
            command += ["--sizes", args.sizes, "--rounds", str(args.rounds)]
            subprocess.run(
                ["bash", "-c", f'exec "$@" 3>"{file}"', "bash", *command],
                env={**os.environ, **harness.ENVIRONMENT, **environment},
                stdout=sys.stderr,
                check=True,
                preexec_fn=die_with_parent(),
            )
            results[name] = json.loads(file.read_text())
    print(f"{'blocks':>8}{'built-in ms':>14}{'kvprism ms':>13}{'step held ms':>14}")
    for size in sizes:
        theirs, ours = results["built-in"][str(size)], results["kvprism"][str(size)]
        print(
            f"{size:>8}{theirs['answer'] * 1e3:>14.2f}{ours['answer'] * 1e3:>13.2f}"
            f"{ours['held'] * 1e3:>14.3f}"
        )
    print(json.dumps({"arguments": vars(args), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
