"""Two tensor ranks, each with its own half of every block, and when one does not get its half."""

from __future__ import annotations

from pathlib import Path

import conftest
import harness
import pytest
from harness import LiveEngine, tokens_of
from test_bytes import right

ENGINE = {"block_size": 32, "tensor_parallel_size": 2}


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
