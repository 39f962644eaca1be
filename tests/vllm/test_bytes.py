"""Bytes, not only tokens: every valid block is what a model has left there, whatever happens.

A worker extension (byte_watch.py) compares them; blocks that are handed out anew hold a pattern.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import conftest
import harness
import pytest
from harness import LiveEngine, tokens_of
from kvprism.local_mooncake import LocalMooncake
from test_four_ways import objects_of, pieces_in, ring_pieces

ATTENTION: dict[str, Any] = {"block_size": 32}
STATES: dict[str, Any] = {"dtype": "bfloat16", "mamba_cache_mode": "align"}
LENGTH = 120
# Engine options, and those with which the prompts do not fit beside their answers.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        ATTENTION,
        {"max_model_len": 1024, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 56},
    ),
    "gemma3": (
        ATTENTION,
        {"max_model_len": 1024, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 120},
    ),
    "ring_qwen3next": (
        STATES,
        {"max_model_len": 1024, "max_num_seqs": 4, "num_gpu_blocks_override": 15},
    ),
}
# Hits end inside the large blocks of the states. With fewer blocks vLLM admits loads beside which
# no request could go on: of those that it has loaded none is preempted.
MODELS["qwen3next_fine"] = (
    STATES | {"prefix_match_unit": 32},
    MODELS["ring_qwen3next"][1] | {"num_gpu_blocks_override": 24},
)


def connect(mooncake: LocalMooncake, name: str = "", **options: Any) -> dict[str, Any]:
    connector = harness.kvprism_connector(mooncake.master, **options)
    if name:
        connector |= {"kv_connector": name, "kv_connector_module_path": "faulty"}
    return connector


def right(answer: dict[str, Any], least: int = 0) -> None:
    """Nothing was wrong and something was compared, `least` with which requests began."""
    for rank in answer["watch"]:
        assert rank["wrong"] == 0, "\n".join(rank["first"])
        assert rank["compared"] + rank["again"] > 0, rank
        assert rank["compared"] >= least, rank


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        pytest.param("gemma3", marks=pytest.mark.soak),
        "ring_qwen3next",
        pytest.param("qwen3next_fine", marks=pytest.mark.soak),
    ],
)
def test_a_small_cache_aborts_and_resets(name: str, tmp_path: Path) -> None:
    path, (engine, small) = conftest.model(name.removesuffix("_fine")), MODELS[name]
    notes, record = tmp_path / "notes", tmp_path / "rings"
    ring = "ring" in name
    asked = harness.prompts()
    with LiveEngine(path, engine=engine, watch=notes) as cold:
        answer = cold.serve(asked, max_tokens=LENGTH)
    right(answer)
    assert answer["watch"][0]["written"] > 0
    expected = tokens_of(answer)
    with (
        LocalMooncake(storage_bytes=1 << 30) as mooncake,
        LiveEngine(
            path,
            engine=engine | small,
            connector=connect(mooncake, "CheckedConnector", save_decode_cache=ring),
            environment={"RING_RECORD": str(record)} if ring else {},
            watch=notes,
        ) as running,
    ):
        for reset in (False, True):
            answer = running.serve(asked, max_tokens=LENGTH, reset=reset)
            right(answer)
            assert tokens_of(answer) == expected
        assert answer["preemptions"] > 0
        for steps in (1, 2, 3, 5, 8):
            running.serve(asked, reset=True, abort_after=steps)
        answer = running.serve(asked, max_tokens=LENGTH, reset=True)
        right(answer, least=30)
        assert tokens_of(answer) == expected
        assert answer["hits"] > 0
        assert answer["counters"]["loads_failed"] == 0
        assert ("fine" in name) == (answer["watch"][0]["tails"] > 0)
        if ring:
            running.serve([], settle=True)
            pieces = ring_pieces(record)
            assert len(pieces) > 1000
            assert not pieces_in(objects_of(mooncake), pieces[:: len(pieces) // 500])


def test_damage_would_be_seen(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with LocalMooncake(storage_bytes=1 << 30) as mooncake:
        connector = connect(mooncake) | {
            "kv_connector": "DamagingConnector",
            "kv_connector_module_path": "damaging",
        }
        with LiveEngine(
            conftest.model("llama"), engine=ATTENTION, connector=connector, watch=notes
        ) as engine:
            right(engine.serve(harness.prompts()))
            (rank,) = engine.serve(harness.prompts(), reset=True)["watch"]
    assert rank["wrong"] >= rank["compared"] > 0
    assert "other bytes" in rank["first"][0]


def test_two_ranks_one_of_them_late(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    engine = ATTENTION | {"tensor_parallel_size": 2}
    with (
        harness.patient_mooncake() as mooncake,
        LiveEngine(
            conftest.model("llama"),
            engine=engine,
            # Late, and not too late, also on a machine that is busy with other work.
            connector=connect(mooncake, "OneRankLateConnector", load_timeout_seconds=300.0),
            watch=notes,
        ) as running,
    ):
        cold = running.serve(harness.prompts(), settle=True)
        right(cold)
        for steps in (2, 6):
            running.serve(harness.prompts(), reset=True, abort_after=steps)
        warm = running.serve(harness.prompts(), reset=True)
        right(warm, least=50)
        assert tokens_of(warm) == tokens_of(cold)
        assert warm["hits"] > 0
        assert warm["counters"]["loads_failed"] == 0


@pytest.mark.parametrize("name", ["gemma3", "ring_qwen3next"])
def test_the_storage_goes(name: str, tmp_path: Path) -> None:
    """vLLM hears of requests, not of blocks, where a model has several groups."""
    asked = harness.prompts()
    with (
        LocalMooncake(storage_bytes=1 << 30) as mooncake,
        LiveEngine(
            conftest.model(name),
            engine=MODELS[name][0],
            connector=connect(mooncake),
            watch=tmp_path / "notes",
        ) as engine,
    ):
        cold = engine.serve(asked, settle=True)
        right(cold)
        mooncake.stop_storage()
        lost = engine.serve(asked, reset=True)
        again = engine.serve(asked)
    for answer in (lost, again):
        right(answer)
        assert tokens_of(answer) == tokens_of(cold)
        assert {output["finish"] for output in answer["outputs"]} == {"length"}
    assert lost["counters"]["loads"] == lost["counters"]["loads_failed"] == 4
    assert lost["counters"]["loaded_tokens"] == 0 < lost["counters"]["hit_tokens"]


@pytest.mark.parametrize("name", ["llama", "gemma3", "ring_qwen3next"])
def test_the_master_goes_in_the_middle_of_loads(name: str, tmp_path: Path) -> None:
    notes, told = tmp_path / "notes", tmp_path / "told"
    asked = harness.prompts(prefix=0, suffixes=(3000, 3100, 3200, 3300))
    with (
        LocalMooncake(storage_bytes=1 << 30) as mooncake,
        LiveEngine(
            conftest.model(name),
            engine=MODELS[name][0],
            # Many small calls, so that the loads are not over at once.
            connector=connect(
                mooncake,
                "TellsOfLoadsConnector",
                max_segments_per_call=2,
                max_gets_in_flight=1,
                load_timeout_seconds=5.0,
            ),
            environment={"TELL_LOADS": str(told)},
            watch=notes,
        ) as engine,
    ):
        cold = engine.serve(asked, settle=True)
        right(cold)
        assert not told.exists()
        answers: list[dict[str, Any]] = []
        thread = threading.Thread(
            target=lambda: answers.append(engine.serve(asked, reset=True)), daemon=True
        )
        thread.start()
        end = time.monotonic() + 120
        while not told.exists():
            assert time.monotonic() < end
            time.sleep(0.001)
        mooncake.stop_master()
        thread.join(300)
        (warm,) = answers
        # Of what was promised a part came, was used where there is one group, and was right.
        alone = name == "llama"
        right(warm, least=cold["watch"][0]["compared"] + alone)
        assert tokens_of(warm) == tokens_of(cold)
        counters = warm["counters"]
        assert counters["loads_failed"] > 0, counters
        assert alone <= counters["loaded_tokens"] < counters["hit_tokens"], counters
        mooncake.start_master()
