"""Engines one after the other in this process: a JSON task on stdin, a JSON line on fd 3.

The task has ``model``, ``engine`` (arguments of vllm.LLM), ``max_tokens`` and ``engines``, each
with ``connector`` (a kv-transfer config or null) and ``rounds`` of prompts (token ids); the
engine's own prefix cache is emptied between rounds when ``reset`` is true. With ``abrupt`` the
process ends without tidying up, which may hang with vLLM's own store connector.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")


def run_all(task: dict[str, Any]) -> list[dict[str, Any]]:
    import vllm.v1.worker.cpu.shm  # noqa: F401  # placeholders for torch.cuda.Event
    from vllm.distributed import cleanup_dist_env_and_memory

    if "ring" in Path(task["model"]).name:
        import ring_model

        ring_model.register()
    results = []
    for engine in task["engines"]:
        results.append(run(task, engine))
        if not task.get("abrupt"):
            gc.collect()
            cleanup_dist_env_and_memory()
    return results


def run(task: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    arguments = dict(task["engine"])
    if engine.get("connector"):
        arguments["kv_transfer_config"] = engine["connector"]
    begin = time.monotonic()
    llm = LLM(model=task["model"], **arguments)
    started = time.monotonic()
    parameters = SamplingParams(
        temperature=0.0, max_tokens=task.get("max_tokens", 16), ignore_eos=True, logprobs=2
    )
    rounds = []
    hits_before = external_hits(llm)
    for number, prompts in enumerate(engine["rounds"]):
        if number and engine.get("reset"):
            empty_prefix_cache(llm)
        at = time.monotonic()
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False
        )
        seconds = time.monotonic() - at
        hits = external_hits(llm)
        rounds.append(
            {
                "seconds": seconds,
                "outputs": [describe(output) for output in outputs],
                "hits": hits - hits_before,
            }
        )
        hits_before = hits
    settle(llm)
    result = {
        "version": version(),
        "start_seconds": started - begin,
        "rounds": rounds,
        "counters": counters(llm),
    }
    if engine.get("ring_pieces"):
        import ring_model

        pieces = sorted(ring_model.written)
        Path(engine["ring_pieces"]).write_bytes(b"".join(pieces))
        result["rings"] = rings_in_memory(llm, pieces)
    llm.llm_engine.engine_core.shutdown()
    return result


def version() -> str:
    """What the package says, since several versions share one environment."""
    from vllm.version import __version_tuple__

    return ".".join(str(part) for part in __version_tuple__[:3])


def settle(llm: Any) -> None:
    """Steps the engine until its connector has heard of everything that it has started."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    end = time.monotonic() + 60
    while connector is not None and connector.has_pending_push_work():
        if time.monotonic() > end:
            raise TimeoutError("work stays pending")
        core.step_fn()
    queue = _queue_of_the_built_in()
    while queue is not None and queue.unfinished_tasks:
        if time.monotonic() > end:
            raise TimeoutError("saves of the built-in connector stay pending")
        time.sleep(0.01)


def _queue_of_the_built_in() -> Any:
    """What its thread has still to save in this process, of which it tells nobody."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    if not kv_transfer_state.has_kv_transfer_group():
        return None
    inside = getattr(kv_transfer_state.get_kv_transfer_group(), "connector_worker", None)
    return getattr(getattr(inside, "kv_send_thread", None), "request_queue", None)


def empty_prefix_cache(llm: Any) -> None:
    """Waits for saves, whose blocks are in use, by stepping the engine."""
    core = llm.llm_engine.engine_core.engine_core
    end = time.monotonic() + 300
    while not llm.reset_prefix_cache():
        if time.monotonic() > end:
            raise TimeoutError("blocks stay in use")
        core.step_fn()


def describe(output: Any) -> dict[str, Any]:
    """Of each token also by how much it was more likely than the next one."""
    choice = output.outputs[0]
    likely = [
        sorted((each.logprob for each in step.values()), reverse=True)
        for step in (choice.logprobs or [])
    ]
    return {
        "tokens": list(choice.token_ids),
        "finish": choice.finish_reason,
        "cached": output.num_cached_tokens,
        "logprobs": [next(iter(step.values())).logprob for step in (choice.logprobs or [])],
        "margins": [best - second for best, second, *_ in likely],
    }


def external_hits(llm: Any) -> int:
    """Tokens found in the store so far, as vLLM's own metrics count them."""
    for metric in llm.get_metrics():
        if metric.name == "vllm:external_prefix_cache_hits":
            return int(metric.value)
    return 0


def counters(llm: Any) -> dict[str, Any] | None:
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    for each in (connector, *getattr(connector, "sub_connectors", ())):
        half = getattr(each, "_scheduler", None)
        if half is not None:
            found: dict[str, Any] = half.counters()
            return found
    return None


def rings_in_memory(llm: Any, pieces: list[bytes]) -> int:
    """How many of the pieces the rings' own memory still holds: the search can find them."""
    import torch

    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    wanted = set(pieces)
    found = set()
    for name, layer in runner.vllm_config.compilation_config.static_forward_context.items():
        if name.endswith(".ring"):
            length = len(pieces[0]) // layer.kv_cache.element_size()
            rows = layer.kv_cache[:, :, :length].contiguous().view(torch.uint8)
            for row in rows.view(-1, len(pieces[0])).numpy():
                found.add(row.tobytes())
    return len(found & wanted)


def main() -> None:
    answer = os.fdopen(3, "w")
    orders = json.load(sys.stdin)
    json.dump(run_all(orders), answer)
    answer.close()
    if orders.get("abrupt"):
        os._exit(0)


if __name__ == "__main__":
    main()
