"""One pool for both connectors: each continues from what the other has stored."""

from __future__ import annotations

from pathlib import Path

import conftest
import harness
import pytest
from harness import Engine
from kvprism.local_mooncake import LocalMooncake
from test_four_ways import BUILTIN, MODELS, builtin_environment

ENGINE = {"block_size": 32}


@pytest.mark.parametrize(
    "name",
    # test_streams.py shares a pool, too; here it is with a prefix
    [
        pytest.param("llama", marks=pytest.mark.soak),
        pytest.param("llama_tp2", marks=pytest.mark.soak),
        "qwen3next",
        pytest.param("ring_llama", marks=pytest.mark.soak),
    ],
)
def test_the_built_in_connector_and_ours_share_a_pool(name: str, tmp_path: Path) -> None:
    path = conftest.model(name.removesuffix("_tp2"))
    engine, expected = MODELS[name]
    prefixed = BUILTIN | {"kv_connector_extra_config": {"cache_prefix": "ours-first"}}
    with LocalMooncake(storage_bytes=1 << 30) as mooncake:
        shared = {"key_schema": "vllm"}
        reader = harness.kvprism_connector(mooncake.master, **shared)
        writer = harness.kvprism_connector(mooncake.master, cache_prefix="ours-first", **shared)
        environment = builtin_environment(mooncake, tmp_path)
        (theirs,) = harness.run_engines(
            path, [Engine(BUILTIN)], engine=engine, environment=environment, abrupt=True
        )
        # Tensor ranks are forked, which a process that has used Mooncake must not be.
        (warm,) = harness.run_engines(path, [Engine(reader)], engine=engine)
        (ours,) = harness.run_engines(path, [Engine(writer)], engine=engine)
        (other,) = harness.run_engines(
            path, [Engine(prefixed)], engine=engine, environment=environment, abrupt=True
        )
    assert harness.hits(theirs) == harness.hits(ours) == 0
    assert harness.hits(warm) == harness.hits(other) == expected
    answers = harness.tokens(theirs)
    assert harness.tokens(warm) == harness.tokens(ours) == harness.tokens(other) == answers


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_one_of_several_children_of_a_multi_connector(first: str, tmp_path: Path) -> None:
    """Both save; the first that has tokens loads, and each has its own namespace."""
    with LocalMooncake(storage_bytes=1 << 30) as mooncake:
        ours = harness.kvprism_connector(mooncake.master, cache_prefix="child")
        both = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "connectors": [ours, BUILTIN] if first == "ours" else [BUILTIN, ours]
            },
        }
        twice = Engine(both, rounds=[harness.prompts()] * 2, reset=True)
        environment = builtin_environment(mooncake, tmp_path)
        arguments = {"engine": ENGINE, "environment": environment}
        path = conftest.model("llama")
        (result,) = harness.run_engines(path, [twice], abrupt=True, **arguments)
        (alone,) = harness.run_engines(path, [Engine(ours)], **arguments)
    assert harness.hits(result) == 0
    assert harness.hits(result, 1) == harness.hits(alone) == 2432
    assert harness.tokens(result) == harness.tokens(result, 1) == harness.tokens(alone)


def test_a_child_whose_load_fails_does_not_fail_its_requests(tmp_path: Path) -> None:
    """The outer connector's policy holds."""
    with LocalMooncake(storage_bytes=1 << 30) as mooncake:
        ours = harness.kvprism_connector(mooncake.master, cache_prefix="failing") | {
            "kv_connector": "SomeRanksFailConnector",
            "kv_connector_module_path": "faulty",
        }
        both = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [ours, BUILTIN]},
        }
        twice = Engine(both, rounds=[harness.prompts()] * 2, reset=True)
        (result,) = harness.run_engines(
            conftest.model("llama"),
            [twice],
            engine=ENGINE,
            environment={"FAILING": "0"} | builtin_environment(mooncake, tmp_path),
            abrupt=True,
        )
    assert harness.tokens(result, 1) == harness.tokens(result)
    for answer in result["rounds"]:
        assert {output["finish"] for output in answer["outputs"]} == {"length"}
    counters = result["counters"]
    assert counters["loads"] == counters["loads_failed"] > 0
    assert "has no effect" not in result["log"]
