"""The same requests through the built-in connector and ours, with its names: the same decisions.

A prompt is computed in chunks, some requests are preempted, later ones continue earlier ones, and
the engine's own cache is emptied between rounds. What differs on purpose is in docs/differences.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import conftest
import harness
from harness import Engine
from kvprism.local_mooncake import LocalMooncake
from test_four_ways import BUILTIN, builtin_environment, objects_of

SMALL = {
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 56,
}


def rounds() -> list[list[list[int]]]:
    """Prompts that are new, known whole, known in part, and longer than known ones."""
    first = harness.prompts(seed=50)
    longer = [prompt + other[-96:] for prompt, other in zip(first, first[::-1], strict=True)]
    others = harness.prompts(seed=51, prefix=64, suffixes=(31, 32, 33, 500))
    return [first, first[::-1], longer, others + first[:2], [prompt[:200] for prompt in longer]]


def run(connector: dict[str, Any], folder: Path) -> tuple[list[Any], dict[str, int]]:
    """Of each round what was cached of each prompt; and the names of all objects, with sizes."""
    with LocalMooncake(storage_bytes=1 << 30) as mooncake:
        if connector is not BUILTIN:
            # The reference has no bounds: a slow machine must not make a difference.
            connector = harness.kvprism_connector(
                mooncake.master,
                key_schema="vllm",
                max_held_percent=100,
                lookup_timeout_seconds=60.0,
                load_timeout_seconds=120.0,
            )
        (result,) = harness.run_engines(
            conftest.model("llama"),
            [Engine(connector, rounds=rounds(), reset=True)],
            engine=SMALL,
            max_tokens=70,
            environment=builtin_environment(mooncake, folder),
            abrupt=True,
        )
        objects = {name: len(value) for name, value in objects_of(mooncake).items()}
    answers = [
        [(output["tokens"], output["cached"]) for output in each["outputs"]]
        for each in result["rounds"]
    ]
    return answers, objects


def hashes(prompts: list[list[int]]) -> set[str]:
    """Of every whole block, as vLLM makes them."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(32, sha256)
    parameters = SamplingParams(max_tokens=1)
    requests = [Request("any", tokens, parameters, None, block_hasher=hasher) for tokens in prompts]
    return {block.hex() for request in requests for block in request.block_hashes}


def test_the_same_names_are_saved_and_the_same_hits_found(tmp_path: Path) -> None:
    theirs, their_objects = run(BUILTIN, tmp_path)
    ours, our_objects = run({}, tmp_path)
    assert ours == theirs
    assert sum(cached for each in ours for _, cached in each) > 5000
    assert {name.rpartition("@")[2] for name in our_objects} == hashes(
        [prompt for asked in rounds() for prompt in asked]
    )
    assert our_objects.items() <= their_objects.items()
    # After a preemption the built-in connector takes a part of the answer for prompt (D14).
    more = {name.rpartition("@")[2] for name in their_objects.keys() - our_objects.keys()}
    answered = [
        prompt + tokens
        for asked, answers in zip(rounds(), ours, strict=True)
        for prompt, (tokens, _) in zip(asked, answers, strict=True)
    ]
    assert more <= hashes(answered)
