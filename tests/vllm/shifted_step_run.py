"""An engine that schedules ahead, loses the output of a decode step, and goes on.

A JSON task on stdin (``model``, ``engine``, ``connector``, ``prompt``), a JSON line on fd 3. The
prompt is answered without a loss first; then a step of its answer is lost, and a next turn begins
with what vLLM takes for that answer.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import engine_run
from engine_live import Bound
from lost_step_run import LostError

ANSWER = 100


def schedule_ahead() -> None:
    """As on other platforms: vLLM does not on CPUs, where it is of no use to it."""
    from vllm.platforms.cpu import CpuPlatform

    choose = CpuPlatform.check_and_update_config

    def chosen(config: Any) -> None:
        choose(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(chosen)


def answer_with_a_loss(engine: Any, prompt: Any, parameters: Any) -> list[int]:
    """So many tokens; the request would not end by itself, as vLLM waits for the lost one."""
    scheduler = engine.engine_core.engine_core.scheduler
    take = scheduler.update_from_output

    def lose(scheduled: Any, output: Any) -> Any:
        if list(scheduled.num_scheduled_tokens.values()) == [1]:
            scheduler.update_from_output = take
            raise LostError
        return take(scheduled, output)

    scheduler.update_from_output = lose
    engine.add_request("shifted", prompt, parameters)
    bound, raised = Bound(), 0
    while bound:
        try:
            outputs = engine.step()
        except LostError:
            raised += 1
            continue
        for output in outputs:
            tokens = list(output.outputs[0].token_ids)
            if len(tokens) >= ANSWER:
                assert raised == 1
                engine.abort_request(["shifted"])
                return tokens
    raise AssertionError


def main() -> None:
    import vllm.v1.worker.cpu.shm  # noqa: F401  # placeholders for torch.cuda.Event
    from vllm import LLM, SamplingParams

    answer = os.fdopen(3, "w")
    task = json.load(sys.stdin)
    schedule_ahead()
    llm = LLM(model=task["model"], kv_transfer_config=task["connector"], **task["engine"])

    def parameters(tokens: int) -> Any:
        return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def saved() -> int:
        engine_run.settle(llm)
        return int((engine_run.counters(llm) or {})["saved_objects"])

    prompt = {"prompt_token_ids": task["prompt"]}
    (whole,) = llm.generate([prompt], parameters(ANSWER), use_tqdm=False)
    before = saved()
    shifted = answer_with_a_loss(llm.llm_engine, prompt, parameters(2 * ANSWER))
    turn = [*task["prompt"], *shifted, 5, 6, 7]
    (second,) = llm.generate([{"prompt_token_ids": turn}], parameters(8), use_tqdm=False)
    found = {
        "whole": list(whole.outputs[0].token_ids),
        "shifted": shifted,
        "turn": turn,
        "cached": second.num_cached_tokens,
        "saved": [before, saved()],
    }
    json.dump(found, answer)
    answer.close()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
