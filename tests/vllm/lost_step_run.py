"""An engine that loses the output of a step in which a load ends, and goes on.

A JSON task on stdin (``model``, ``engine``, ``connector``, ``prompts``), a JSON line on fd 3. The
last prompt is served twice, from an empty store and from a full one; while the second is loaded the
first prompt runs.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import engine_run
from engine_live import Bound


class LostError(Exception):
    """In place of whatever ends a step."""


def reset(llm: Any) -> None:
    """Of vLLM's own cache and the connector's, until objects of before it are gone."""
    engine_run.empty_prefix_cache(llm)
    assert llm.reset_prefix_cache(reset_connector=True)
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    bound = Bound()
    while bound and connector._scheduler._purge_runs():
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], use_tqdm=False)  # too few to be saved


def main() -> None:
    import vllm.v1.worker.cpu.shm  # noqa: F401  # placeholders for torch.cuda.Event
    from vllm import LLM, SamplingParams

    answer = os.fdopen(3, "w")
    task = json.load(sys.stdin)
    llm = LLM(model=task["model"], kv_transfer_config=task["connector"], **task["engine"])
    engine = llm.llm_engine
    scheduler: Any = engine.engine_core.engine_core.scheduler
    beside, loaded = ({"prompt_token_ids": prompt} for prompt in task["prompts"])

    def parameters(tokens: int) -> Any:
        return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    (first,) = llm.generate([loaded], parameters(8), use_tqdm=False)
    engine_run.settle(llm)
    engine_run.empty_prefix_cache(llm)

    take = scheduler.update_from_output

    def lose(scheduled: Any, output: Any) -> Any:
        words = output.kv_connector_output
        if words is not None and words.finished_recving:
            scheduler.update_from_output = take
            raise LostError
        return take(scheduled, output)

    scheduler.update_from_output = lose
    engine.add_request("beside", beside, parameters(2000))
    engine.add_request("loaded", loaded, parameters(8))
    raised, tokens = 0, None
    bound = Bound()
    while bound and tokens is None:
        try:
            outputs = engine.step()
        except LostError:
            raised += 1
            engine.abort_request(["beside"])  # vLLM has lost its token as well
            continue
        for output in outputs:
            if output.request_id.startswith("loaded") and output.finished:
                tokens = list(output.outputs[0].token_ids)

    def saved() -> int:
        engine_run.settle(llm)
        return int((engine_run.counters(llm) or {})["saved_objects"])

    objects = [saved()]
    counters = engine_run.counters(llm) or {}
    for number in range(2):
        if number:
            reset(llm)
        llm.generate([beside], parameters(1), use_tqdm=False)
        objects.append(saved())
    found = {
        "raised": raised,
        "tokens": tokens,
        "expected": list(first.outputs[0].token_ids),
        "loaded_tokens": counters["loaded_tokens"],
        "saved": objects,
        "emptied": llm.reset_prefix_cache(),
    }
    json.dump(found, answer)
    answer.close()
    engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
