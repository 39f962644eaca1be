"""Two tensor ranks, each with its own half of every block, and when one does not get its half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import conftest
import harness
import pytest
from harness import Engine, LiveEngine, tokens_of
from kvprism.local_mooncake import LocalMooncake
from test_bytes import right

pytestmark = pytest.mark.xdist_group("tensor parallel")

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


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_does_not_get_what_it_loads(rank: int, tmp_path: Path) -> None:
    """What either rank lacks is computed by both, whichever tells of it (W-C3)."""
    with harness.patient_mooncake() as mooncake:
        connector = harness.kvprism_connector(mooncake.master) | {
            "kv_connector": "OneRankFailsConnector",
            "kv_connector_module_path": "faulty",
        }
        with LiveEngine(
            conftest.model("llama"),
            engine=ENGINE,
            connector=connector,
            environment={"FAILING_RANK": str(rank)},
            watch=tmp_path / "notes",
        ) as engine:
            cold = engine.serve(harness.prompts())
            warm = engine.serve(harness.prompts(), reset=True)
    for answer in (cold, warm):
        right(answer)
    assert tokens_of(warm) == tokens_of(cold)
    counters = warm["counters"]
    assert counters["loads"] == counters["loads_failed"] > 0
    assert counters["loaded_tokens"] < counters["hit_tokens"]
