"""What becomes of single requests: chunks, preemption, abort, answers, roles and metrics."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import conftest
import harness
import pytest
from harness import LiveEngine, tokens_of
from kvprism.local_mooncake import LocalMooncake
from test_four_ways import BUILTIN, builtin_environment

pytestmark = pytest.mark.xdist_group("requests")

ENGINE = {"block_size": 32}
# Prompts are computed in chunks of 256 tokens, and all four do not fit beside their answers.
SMALL = {
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 56,
}
LENGTH = 120


@pytest.fixture(scope="module")
def mooncake() -> Iterator[LocalMooncake]:
    with LocalMooncake(storage_bytes=1 << 30) as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The first answers to our prompts, of an engine without a connector and with room."""
    with LiveEngine(conftest.model("llama"), engine=ENGINE) as engine:
        return tokens_of(engine.serve(harness.prompts(), max_tokens=LENGTH))


def connect(mooncake: LocalMooncake, role: str = "kv_both", **options: Any) -> dict[str, Any]:
    return harness.kvprism_connector(mooncake.master, **options) | {"kv_role": role}


def test_preemption_and_abort(mooncake: LocalMooncake, expected: list[list[int]]) -> None:
    connector = connect(mooncake, cache_prefix="preemption")
    connector |= {"kv_connector": "CheckedConnector", "kv_connector_module_path": "faulty"}
    with LiveEngine(conftest.model("llama"), engine=SMALL, connector=connector) as engine:
        for reset in (False, True):
            answer = engine.serve(harness.prompts(), max_tokens=LENGTH, reset=reset)
            assert tokens_of(answer) == expected
            assert answer["preemptions"] > 0
        # Those that come later find the common beginning in the engine's own cache.
        assert 2432 - 3 * 288 <= answer["hits"] <= 2432
        loads = answer["counters"]["loads"]
        for steps in (1, 2, 3, 5):
            # `reset` would not succeed if a block stayed in use.
            engine.serve(harness.prompts(), reset=True, abort_after=steps)
        answer = engine.serve(harness.prompts(), max_tokens=LENGTH, reset=True)
        assert tokens_of(answer) == expected
        counters = answer["counters"]
        assert counters["loads"] > loads
        assert counters["loads_failed"] == 0
        assert counters["reports_malformed"] == counters["reports_foreign"] == 0
        assert counters["ledger"]["unknown_notices"] == 0


def test_a_prompt_that_is_stored_whole(mooncake: LocalMooncake) -> None:
    """A token must be left to compute, so the last block of such a prompt is computed again."""
    (prompt,) = harness.prompts(seed=9, prefix=0, suffixes=(608,))
    connector = connect(mooncake, cache_prefix="whole")
    with LiveEngine(conftest.model("llama"), engine=ENGINE, connector=connector) as engine:
        cold = engine.serve([prompt])
        warm = engine.serve([prompt], reset=True, settle=True)
        # Of another salt it is another prompt.
        salts = [engine.serve([prompt], reset=True, settle=True, salt=salt) for salt in "aba"]
        assert [answer["hits"] for answer in (cold, warm, *salts)] == [0, 576, 0, 0, 576]
        for answer in salts:
            assert tokens_of(answer) == tokens_of(cold)
        assert tokens_of(warm) == tokens_of(cold)
        metrics = warm["metrics"]
        assert metrics["vllm:kvprism_loaded_tokens"] == 576
        assert metrics["vllm:kvprism_saved_objects"] == 19
        assert metrics["vllm:kvprism_loads_failed"] == 0


@pytest.mark.parametrize(
    "interval", [64, *(pytest.param(each, marks=pytest.mark.soak) for each in (None, 0))]
)
def test_what_is_kept_of_windows_is_what_the_built_in_connector_keeps(
    mooncake: LocalMooncake, tmp_path: Path, interval: int | None
) -> None:
    """Of a prompt that a later one leaves in its middle: how often windows are kept decides."""
    (prompt,) = harness.prompts(seed=17, prefix=0, suffixes=(608,))
    left = [*prompt[:360], 7]
    engine = ENGINE | {"prefix_cache_retention_interval": interval}
    found = {}
    for builtin in (True, False):
        connector = connect(mooncake, cache_prefix=f"kept{interval}", key_schema="vllm")
        theirs = BUILTIN | {"kv_connector_extra_config": {"cache_prefix": f"theirs{interval}"}}
        with LiveEngine(
            conftest.model("gemma3"),
            engine=engine,
            connector=theirs if builtin else connector,
            environment=builtin_environment(mooncake, tmp_path) if builtin else None,
        ) as running:
            cold = running.serve([prompt], settle=True)
            warm = running.serve([left], reset=True)
            found[builtin] = (cold["hits"], warm["hits"], tokens_of(cold), tokens_of(warm))
            running.kill(signal.SIGKILL)  # the built-in connector may hang when it is closed
    assert found[True] == found[False]
    # Without an interval every window is kept, with 0 the prompt's last one alone.
    hits = found[False][1]
    assert {None: hits == 352, 64: 288 < hits <= 352, 0: hits == 0}[interval], hits


def test_answers_are_saved_when_asked_for(
    mooncake: LocalMooncake, expected: list[list[int]]
) -> None:
    asked = harness.prompts()
    # A second turn: the prompt, its answer, and something new.
    turns = [prompt + answer + [7, 8, 9] for prompt, answer in zip(asked, expected, strict=True)]
    found = {}
    for save in (False, True):
        connector = connect(mooncake, cache_prefix=f"turns{save}", save_decode_cache=save)
        with LiveEngine(conftest.model("llama"), engine=ENGINE, connector=connector) as engine:
            assert tokens_of(engine.serve(asked, max_tokens=LENGTH)) == expected
            found[save] = engine.serve(turns, reset=True)
    assert found[False]["hits"] == 2432
    # The last token of an answer is never computed.
    assert found[True]["hits"] == sum((len(turn) - 4) // 32 * 32 for turn in turns)
    assert tokens_of(found[True]) == tokens_of(found[False])


def test_roles(mooncake: LocalMooncake) -> None:
    asked = harness.prompts()
    path = conftest.model("llama")

    def connector(role: str, **options: Any) -> dict[str, Any]:
        return connect(mooncake, role, cache_prefix="roles", **options)

    with LiveEngine(path, engine=ENGINE, connector=connector("kv_producer")) as engine:
        cold = engine.serve(asked, settle=True)
        warm = engine.serve(asked, reset=True, settle=True)
    assert (cold["hits"], warm["hits"]) == (0, 2432)
    assert tokens_of(warm) == tokens_of(cold)
    assert cold["counters"]["saved_objects"] == 76
    with LiveEngine(path, engine=ENGINE, connector=connector("kv_consumer")) as engine:
        warm = engine.serve(asked)
        engine.serve(harness.prompts(seed=77))
        again = engine.serve(harness.prompts(seed=77), reset=True)
    assert warm["hits"] == 2432
    assert tokens_of(warm) == tokens_of(cold)
    assert again["hits"] == again["counters"]["saves"] == 0
    # With what it decodes a consumer saves what that follows from.
    saving = connector("kv_consumer", save_decode_cache=True)
    others = harness.prompts(seed=78)
    with LiveEngine(path, engine=ENGINE, connector=saving) as engine:
        first = engine.serve(others, max_tokens=64)
        turns = [
            prompt + answer + [7] for prompt, answer in zip(others, tokens_of(first), strict=True)
        ]
        again = engine.serve(turns, reset=True)
        # Also of a request that ends with its prompt.
        engine.serve(harness.prompts(seed=79), max_tokens=1)
        brief = engine.serve(harness.prompts(seed=79), reset=True)
    # The last token of an answer is never computed.
    assert again["hits"] == sum((len(turn) - 2) // 32 * 32 for turn in turns)
    assert brief["hits"] == 2432


def test_answers_with_drafts_are_saved_and_found(mooncake: LocalMooncake) -> None:
    """Rejected drafts are in blocks for a while; what is saved ends before them."""
    # Prompts that repeat themselves, so that there is something to draft from.
    asked = [prompt[:40] * 8 for prompt in harness.prompts(seed=60)]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    path = conftest.model("llama")
    with LiveEngine(path, engine=ENGINE) as engine:
        plain = tokens_of(engine.serve(asked, max_tokens=LENGTH))
    connector = connect(mooncake, cache_prefix="drafts", save_decode_cache=True)
    speculating = ENGINE | {"speculative_config": drafts | {"prompt_lookup_min": 1}}
    with LiveEngine(path, engine=speculating, connector=connector) as engine:
        cold = engine.serve(asked, max_tokens=LENGTH, settle=True)
        assert tokens_of(cold) == plain
        assert cold["drafted"] > cold["accepted"] > 0
        turns = [prompt + answer + [7] for prompt, answer in zip(asked, plain, strict=True)]
        warm = engine.serve(turns, reset=True)
    with LiveEngine(path, engine=ENGINE) as engine:
        assert tokens_of(engine.serve(turns)) == tokens_of(warm)
    # The last token of an answer is never computed.
    assert warm["hits"] == sum((len(turn) - 2) // 32 * 32 for turn in turns)
    assert warm["counters"]["loads_failed"] == 0


@pytest.mark.soak
def test_answers_with_a_draft_model_are_saved_and_found(mooncake: LocalMooncake) -> None:
    """Its cache lies beside the target's, and is stored with it."""
    drafts = {"model": str(conftest.model("llama")), "num_speculative_tokens": 3}
    engine = ENGINE | {"speculative_config": drafts | {"method": "draft_model"}}
    path = conftest.model("llama8")
    asked = harness.prompts(seed=61)
    with LiveEngine(path, engine=engine) as running:
        plain = tokens_of(running.serve(asked, max_tokens=LENGTH))
    connector = connect(mooncake, cache_prefix="drafting")
    with LiveEngine(path, engine=engine, connector=connector) as running:
        cold = running.serve(asked, max_tokens=LENGTH, settle=True)
        warm = running.serve(asked, max_tokens=LENGTH, reset=True)
    assert tokens_of(cold) == tokens_of(warm) == plain
    assert warm["drafted"] > 0, "of random weights hardly any is accepted"
    assert warm["hits"] > 2000
    assert warm["counters"]["loads_failed"] == 0
