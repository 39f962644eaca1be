"""An engine that waits for orders: JSON lines on stdin, answers as JSON lines on fd 3.

The first line has ``model``, ``engine`` and ``connector``, and may have ``watch``: a file for the
notes of byte_watch.py, whose counts are then part of each answer. Each further line has
``prompts``, ``max_tokens`` and ``reset``: empty the engine's own prefix cache first; and
``abort_after``: abort all of them after so many steps, unless it is null; ``settle``: wait for
the connector's work; ``salt``: of their hashes; and ``reset_running``: reset the cache, the
connector's too, and all that runs, once saves hold blocks. An empty line ends it. Where
RING_RECORD names a file, it then has the beginnings of all ring rows that were written.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import engine_run


def main() -> None:
    import vllm.v1.worker.cpu.shm  # noqa: F401  # placeholders for torch.cuda.Event
    from vllm import LLM, SamplingParams

    answer = os.fdopen(3, "w", buffering=1)
    task = json.loads(sys.stdin.readline())
    arguments = dict(task["engine"])
    if task["connector"]:
        arguments["kv_transfer_config"] = task["connector"]
    if "ring" in os.path.basename(task["model"]):
        import ring_model

        ring_model.register()
    watch = task.get("watch")
    if watch:
        arguments["worker_extension_cls"] = "byte_watch.ByteWatch"
    llm = LLM(model=task["model"], **arguments)
    if watch:
        llm.collective_rpc("byte_watch_start", args=(watch,))
    lookups = Lookups(llm)
    answer.write(json.dumps({"started": True}) + "\n")
    for line in sys.stdin:
        if not line.strip():
            break
        order = json.loads(line)
        before = engine_run.external_hits(llm)
        if order["reset"]:
            engine_run.empty_prefix_cache(llm)
        parameters = SamplingParams(
            temperature=0.0, max_tokens=order["max_tokens"], ignore_eos=True, logprobs=2
        )
        lookups.steps.clear()
        at, cpu, refused = time.monotonic(), time.process_time(), 0
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in order["prompts"]]
        if order["salt"]:
            prompts = [prompt | {"cache_salt": order["salt"]} for prompt in prompts]
        if order["abort_after"] is not None:
            outputs = []
            abort(llm.llm_engine, prompts, parameters, order["abort_after"])
        elif order["reset_running"]:
            outputs, refused = reset_running(llm, prompts, parameters)
        else:
            outputs = llm.generate(prompts, parameters, use_tqdm=False)
        seconds, cpu_seconds = time.monotonic() - at, time.process_time() - cpu
        if order.get("settle"):
            engine_run.settle(llm)
        reply: dict[str, Any] = {
            "seconds": seconds,
            "steps_of_lookups": lookups.steps,
            "cpu_seconds": cpu_seconds,
            "outputs": [engine_run.describe(output) for output in outputs],
            "hits": engine_run.external_hits(llm) - before,
            "counters": engine_run.counters(llm),
            "resets_refused": refused,
            "preemptions": metric(llm, "vllm:num_preemptions"),
            "drafted": metric(llm, "vllm:spec_decode_num_draft_tokens"),
            "accepted": metric(llm, "vllm:spec_decode_num_accepted_tokens"),
            "metrics": {
                entry.name: entry.value
                for entry in llm.get_metrics()
                if entry.name.startswith("vllm:kvprism_")
            },
        }
        if watch:
            reply["watch"] = llm.collective_rpc("byte_watch_report")
        if record := os.environ.get("RING_RECORD"):
            with open(record, "wb") as file:
                file.write(b"".join(sorted(ring_model.written)))
        answer.write(json.dumps(reply) + "\n")
    llm.llm_engine.engine_core.shutdown()
    answer.write(json.dumps({"ended": True}) + "\n")


class Lookups:
    """In how many steps vLLM was told to ask again, of each request: none waits for an answer."""

    def __init__(self, llm: Any) -> None:
        self.steps: dict[str, int] = {}
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        self._connector = getattr(getattr(core, "scheduler", None), "connector", None)
        if self._connector is not None:
            self._look_up = self._connector.get_num_new_matched_tokens
            self._connector.get_num_new_matched_tokens = self._counted

    def _counted(self, request: Any, computed: int) -> Any:
        found = self._look_up(request, computed)
        if found[0] is None:
            self.steps[request.request_id] = self.steps.get(request.request_id, 0) + 1
        return found


class Bound:
    """Of a loop that ends by itself, unless something is wrong."""

    def __init__(self, seconds: float = 300.0) -> None:
        self._end = time.monotonic() + seconds

    def __bool__(self) -> bool:
        if time.monotonic() > self._end:
            raise TimeoutError("a loop has no end")
        return True


def abort(engine: Any, prompts: list[Any], parameters: Any, steps: int) -> None:
    """Aborts requests while they wait, load or run."""
    for number, prompt in enumerate(prompts):
        engine.add_request(f"aborted-{number}", prompt, parameters)
    for _ in range(steps):
        engine.step()
    engine.abort_request([f"aborted-{number}" for number in range(len(prompts))])
    bound = Bound()
    while bound and engine.has_unfinished_requests():
        engine.step()


def reset_running(llm: Any, prompts: list[Any], parameters: Any) -> tuple[list[Any], int]:
    """Their answers, in order, and how often the reset was refused because blocks were in use."""
    engine = llm.llm_engine
    ended: dict[str, Any] = {}

    def step() -> None:
        ended.update({each.request_id: each for each in engine.step() if each.finished})

    for number, prompt in enumerate(prompts):
        engine.add_request(f"reset-{number}", prompt, parameters)
    bound = Bound()
    while bound and not (engine_run.counters(llm) or {})["ledger"]["blocks_held"]:
        step()
    refused = 0
    while bound:
        try:
            if engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
                break
            raise ValueError("the connector was not reset")
        except RuntimeError:
            refused += 1
        step()
    while bound and engine.has_unfinished_requests():
        step()
    return [ended[f"reset-{number}"] for number in range(len(prompts))], refused


def metric(llm: Any, name: str) -> int:
    return sum(int(entry.value) for entry in llm.get_metrics() if entry.name == name)


if __name__ == "__main__":
    main()
