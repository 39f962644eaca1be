"""One engine from start to end, in a process of its own: a JSON task on stdin, a JSON line on fd 3.

The task has ``model``, ``engine`` (arguments of vllm.LLM), ``prompts`` (token ids), ``max_tokens``
and ``connector`` (a kv-transfer config or null).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")


def run(task: dict[str, Any]) -> dict[str, Any]:
    import vllm.v1.worker.cpu.shm  # noqa: F401  # placeholders for torch.cuda.Event
    from vllm import LLM, SamplingParams

    arguments = dict(task["engine"])
    if task.get("connector"):
        arguments["kv_transfer_config"] = task["connector"]
    begin = time.monotonic()
    llm = LLM(model=task["model"], **arguments)
    started = time.monotonic()
    parameters = SamplingParams(
        temperature=0.0, max_tokens=task.get("max_tokens", 16), ignore_eos=True, logprobs=0
    )
    rounds = []
    for prompts in task["rounds"]:
        at = time.monotonic()
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False
        )
        rounds.append(
            {
                "seconds": time.monotonic() - at,
                "outputs": [describe(output) for output in outputs],
                "external": external_hits(llm),
            }
        )
    result = {"start_seconds": started - begin, "rounds": rounds, "counters": counters(llm)}
    llm.llm_engine.engine_core.shutdown()
    return result


def describe(output: Any) -> dict[str, Any]:
    choice = output.outputs[0]
    return {
        "tokens": list(choice.token_ids),
        "finish": choice.finish_reason,
        "cached": output.num_cached_tokens,
        "logprobs": [
            next(iter(step.values())).logprob for step in (choice.logprobs or [])
        ],
    }


def scheduler_of(llm: Any) -> Any:
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    return getattr(core, "scheduler", None)


def external_hits(llm: Any) -> dict[str, int]:
    """Tokens asked of the store and found there so far, as vLLM's own metrics count them."""
    values = {metric.name: metric for metric in llm.get_metrics()}
    return {
        word: int(getattr(values.get(f"vllm:external_prefix_cache_{word}"), "value", 0))
        for word in ("queries", "hits")
    }


def counters(llm: Any) -> dict[str, Any] | None:
    connector = getattr(scheduler_of(llm), "connector", None)
    half = getattr(connector, "_scheduler", None)
    return half.counters() if half is not None else None


if __name__ == "__main__":
    answer = os.fdopen(3, "w")
    json.dump(run(json.load(sys.stdin)), answer)
    answer.close()
