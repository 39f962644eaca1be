"""The same requests through the built-in connector and ours, with its names: the same decisions.

A prompt is computed in chunks, some requests are preempted, later ones continue earlier ones, and
the engine's own cache is emptied between rounds. Then a new engine with each connector continues
from what the other one has stored. What differs on purpose is in docs/differences.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import conftest
import harness
import pytest
from harness import Engine
from kvprism.local_mooncake import LocalMooncake
from test_bytes import MODELS as SMALL
from test_four_ways import BUILTIN, builtin_environment, objects_of
from test_four_ways import MODELS as WHOLE

# Tokens of a hash; the window groups, by their place among the stored ones.
UNITS = {"llama": 32, "gemma3": 32, "ring_qwen3next": 256}
WINDOWS = {"gemma3": ("0", "1")}


def rounds() -> list[list[list[int]]]:
    """Prompts that are new, known whole, known in part, and longer than known ones."""
    first = harness.prompts(seed=50)
    longer = [prompt + other[-96:] for prompt, other in zip(first, first[::-1], strict=True)]
    others = harness.prompts(seed=51, prefix=64, suffixes=(31, 32, 33, 500))
    return [first, first[::-1], longer, others + first[:2], [prompt[:200] for prompt in longer]]


def connect(mooncake: LocalMooncake, *, builtin: bool) -> dict[str, Any]:
    if builtin:
        return BUILTIN
    # The reference has no bounds: a slow machine must not make a difference.
    return harness.kvprism_connector(
        mooncake.master,
        key_schema="vllm",
        max_held_percent=100,
        lookup_timeout_seconds=60.0,
        load_timeout_seconds=120.0,
    )


def run(
    name: str, mooncake: LocalMooncake, folder: Path, *, builtin: bool
) -> tuple[list[Any], dict[str, int]]:
    """Of each round what was cached of each prompt; and the names of all objects, with sizes."""
    engine, small = SMALL[name]
    (result,) = harness.run_engines(
        conftest.model(name),
        [Engine(connect(mooncake, builtin=builtin), rounds=rounds(), reset=True)],
        engine=engine | small,
        max_tokens=70,
        environment=builtin_environment(mooncake, folder),
        abrupt=True,
    )
    answers = [
        [(output["tokens"], output["cached"]) for output in each["outputs"]]
        for each in result["rounds"]
    ]
    return answers, {key: len(value) for key, value in objects_of(mooncake).items()}


def continue_from(
    name: str, mooncake: LocalMooncake, folder: Path, *, builtin: bool
) -> tuple[list[list[int]], int]:
    """Answers to the first round's prompts, and how many tokens of them were in the store."""
    (result,) = harness.run_engines(
        conftest.model(name),
        [Engine(connect(mooncake, builtin=builtin), rounds=rounds()[:1])],
        engine=SMALL[name][0],
        max_tokens=70,
        environment=builtin_environment(mooncake, folder),
        abrupt=True,
    )
    return harness.tokens(result), harness.hits(result)


def hashes(prompts: list[list[int]], unit: int) -> set[str]:
    """Of every whole block, as vLLM makes them."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(unit, sha256)
    parameters = SamplingParams(max_tokens=1)
    requests = [Request("any", tokens, parameters, None, block_hasher=hasher) for tokens in prompts]
    return {block.hex() for request in requests for block in request.block_hashes}


@pytest.mark.parametrize("name", list(UNITS))
def test_names_and_hits_are_the_same_and_each_continues_from_the_other(
    name: str, tmp_path: Path
) -> None:
    with LocalMooncake(storage_bytes=1 << 30) as one, LocalMooncake(storage_bytes=1 << 30) as other:
        theirs, their_objects = run(name, one, tmp_path, builtin=True)
        ours, our_objects = run(name, other, tmp_path, builtin=False)
        we_read = continue_from(name, one, tmp_path, builtin=False)
        they_read = continue_from(name, other, tmp_path, builtin=True)
    answers = [[tokens for tokens, _ in each] for each in ours]
    assert answers == [[tokens for tokens, _ in each] for each in theirs]
    assert we_read == they_read == (answers[0], WHOLE[name][1])
    # Of the first round only the engine itself has something, which is a matter of its schedule; so
    # are its own large blocks of states in later ones.
    pairs = [
        (their_hit, our_hit)
        for their_round, our_round in zip(theirs[1:], ours[1:], strict=True)
        for (_, their_hit), (_, our_hit) in zip(their_round, our_round, strict=True)
    ]
    assert sum(our_hit for _, our_hit in pairs) > 4000

    def hash_of(key: str) -> str:
        return key.rpartition("@")[2]

    def group_of(key: str) -> str:
        return key.rpartition("@group:")[2].split("@")[0]

    asked = hashes([prompt for each in rounds() for prompt in each], UNITS[name])
    assert {hash_of(key) for key in our_objects} <= asked
    both = our_objects.keys() & their_objects.keys()
    assert {key: our_objects[key] for key in both} == {key: their_objects[key] for key in both}
    # Windows are also kept where a prompt leaves what others have stored, and then found (D16).
    more = our_objects.keys() - their_objects.keys()
    assert {group_of(key) for key in more} <= set(WINDOWS.get(name, ()))
    if name in WINDOWS:
        assert all(our_hit >= their_hit for their_hit, our_hit in pairs)
    if name == "llama":
        assert all(our_hit == their_hit for their_hit, our_hit in pairs)
        assert {hash_of(key) for key in our_objects} == asked
    # After a preemption the built-in connector takes a part of the answer for prompt (D14).
    answered = [
        prompt + tokens
        for each, replies in zip(rounds(), answers, strict=True)
        for prompt, tokens in zip(each, replies, strict=True)
    ]
    less = {hash_of(key) for key in their_objects.keys() - our_objects.keys()}
    assert less <= hashes(answered, UNITS[name]) - asked
