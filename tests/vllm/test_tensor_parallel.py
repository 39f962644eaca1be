"""Two tensor ranks, each with its own half of every block, and when one does not get its half."""

from __future__ import annotations

from pathlib import Path

import conftest
import harness
import pytest
from harness import LiveEngine, tokens_of
from test_bytes import right

ENGINE = {"block_size": 32, "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("name", "failing", "late"),
    [
        pytest.param("llama", "0", "1", marks=pytest.mark.soak),
        ("llama", "1", "0"),
        ("llama", "0,1", "0"),
        pytest.param("llama", "0,1", "1", marks=pytest.mark.soak),
        pytest.param("llama", "0", "0", marks=pytest.mark.soak),
        pytest.param("llama", "1", "1", marks=pytest.mark.soak),
        ("gemma3", "1", "0"),
        pytest.param("gemma3", "0", "1", marks=pytest.mark.soak),
    ],
)
def test_ranks_do_not_get_what_they_load(
    name: str, failing: str, late: str, tmp_path: Path
) -> None:
    """What any rank lacks is computed by both, whichever tells of it, and when (W-C3)."""
    with harness.patient_mooncake() as mooncake:
        connector = harness.kvprism_connector(mooncake.master, load_timeout_seconds=300.0) | {
            "kv_connector": "SomeRanksFailConnector",
            "kv_connector_module_path": "faulty",
        }
        with LiveEngine(
            conftest.model(name),
            engine=ENGINE,
            connector=connector,
            environment={"FAILING": failing, "LATE": late},
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
