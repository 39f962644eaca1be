"""Two tensor ranks, each with its own half of every block."""

from __future__ import annotations

from typing import Any

import conftest
import harness
import pytest
from harness import Engine
from kvprism.local_mooncake import LocalMooncake

ENGINE = {"block_size": 32, "tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def runs() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    path = conftest.model("llama")
    with LocalMooncake(storage_bytes=1 << 30) as mooncake:
        ours = harness.kvprism_connector(mooncake.master)
        none, cold = harness.run_engines(path, [Engine(), Engine(ours)], engine=ENGINE)
        (warm,) = harness.run_engines(path, [Engine(ours)], engine=ENGINE)
    return none, cold, warm


def test_both_ranks_store_and_load(runs: tuple[dict[str, Any], ...]) -> None:
    none, cold, warm = runs
    assert harness.tokens(cold) == harness.tokens(warm) == harness.tokens(none)
    assert harness.hits(cold) == 0
    assert cold["counters"]["saved_objects"] == 2 * 76
    assert harness.hits(warm) == 2432
    assert warm["counters"]["loaded_objects"] == 2 * 76
    assert warm["counters"]["loads_failed"] == 0
    assert harness.largest_logprob_difference(warm, none) <= 1e-5
