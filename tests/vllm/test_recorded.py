"""What a real engine has asked the built-in connector, asked of ours.

An engine with a small cache and Mooncake serves rounds of requests: new ones, shared beginnings and
known ones, in chunks, preempted and aborted, its own cache emptied now and then. stream_record.py
writes down its calls and their answers, and stream_replay.py repeats them with both halves of ours:
the same hits, the same loads into the same blocks, the same objects with the same bytes. What
differs on purpose is in docs/differences.md.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import conftest
import harness
import kvprism
import pytest
import stream_record
from kvprism.vllm import scheduler_side, worker_side
from stream_record import Allocated, Ended, Lookup
from stream_replay import Replay
from test_decisions import prompt_of
from test_four_ways import builtin_environment, keys_of

ROUNDS = 16
RECORDER = {
    "kv_connector": "RecordingConnector",
    "kv_connector_module_path": "stream_record",
    "kv_role": "kv_both",
}
# Requests in chunks that run out of blocks; the built-in's answers are recorded at once.
SMALL = {
    "max_num_seqs": 4,
    "scheduler_reserve_full_isl": False,
    "async_scheduling": False,
}


@dataclass(frozen=True)
class Model:
    """Options of its engine, and bounds of prompt_of."""

    engine: dict[str, Any]
    shared: int
    more: int
    windows: frozenset[str] = frozenset()
    """Groups of which ours may keep more (D16), by their names in keys."""


STATES = {
    "dtype": "bfloat16",
    "mamba_cache_mode": "align",
    "max_model_len": 864,
    "max_num_batched_tokens": 512,
}
MODELS = {
    "llama": Model(
        {
            "block_size": 32,
            "max_model_len": 352,
            "max_num_batched_tokens": 96,
            "num_gpu_blocks_override": 12,
        },
        6,
        5,
    ),
    "gemma3": Model(
        {
            "block_size": 32,
            "max_model_len": 768,
            "max_num_batched_tokens": 64,
            "num_gpu_blocks_override": 52,
        },
        12,
        12,
        frozenset({"0", "1"}),
    ),
    "ring_qwen3next": Model(STATES | {"num_gpu_blocks_override": 21}, 14, 14),
    # Hits end inside the large blocks of the states.
    "qwen3next_fine": Model(
        STATES | {"num_gpu_blocks_override": 14, "prefix_match_unit": 32}, 14, 6
    ),
}


def record(name: str, folder: Path) -> Path:
    """The file with what an engine did."""
    model, stream = MODELS[name], folder / "stream"
    with harness.patient_mooncake() as mooncake:
        environment = builtin_environment(mooncake, folder) | {"STREAM_RECORD": str(stream)}
        with harness.LiveEngine(
            conftest.model(name.removesuffix("_fine")),
            engine=model.engine | SMALL,
            connector=RECORDER,
            environment=environment,
        ) as engine:
            serve_rounds(engine, model)
            engine.kill(signal.SIGKILL)  # the built-in connector may hang when it is closed
        keys = keys_of(mooncake)
    ends = (each for each in stream_record.read(stream) if isinstance(each, Ended))
    assert {name for end in ends for put in end.puts for name in put.names} == keys
    return stream


def serve_rounds(engine: harness.LiveEngine, model: Model) -> None:
    draw = random.Random(11)
    known: list[list[int]] = []
    for number in range(ROUNDS):
        asked = [
            prompt_of(draw, known, model.shared, model.more) for _ in range(draw.randrange(1, 8))
        ]
        known += asked
        aborted = number % 3 == 2  # some of them while they load
        engine.serve(
            asked,
            max_tokens=draw.randrange(1, 12),
            reset=draw.random() < 0.6 or aborted,
            abort_after=1 + number % 5 if aborted else None,
            settle=True,
        )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.xdist_group(f"recorded_{name}")) for name in MODELS
    ],
)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model's name and its recorded stream."""
    return request.param, record(request.param, tmp_path_factory.mktemp(request.param))


def replay(
    stream: list[Any], monkeypatch: pytest.MonkeyPatch, windows: frozenset[str]
) -> Counter[str]:
    pool = kvprism.MemoryPool()
    checked = functools.partial(kvprism.StoreScheduler, checked=True)  # refuses calls out of order
    monkeypatch.setattr(scheduler_side, "StoreScheduler", checked)
    for side in (scheduler_side, worker_side):
        monkeypatch.setattr(side, "open_store", lambda *_, **__: kvprism.memory_store(pool))
    replayed = Replay(stream, pool, windows)
    try:
        replayed.run()
    finally:
        replayed.close()
    return replayed.counts


def test_the_same_is_found_loaded_and_stored(
    recorded: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, stream = recorded
    counts = replay(stream_record.read(stream), monkeypatch, MODELS[name].windows)
    assert counts["found"] > 2000, counts
    assert counts["loads"] > 5, counts
    assert counts["preempted"] > 0, counts
    assert counts["FINISHED_ABORTED"] > 10, counts
    assert (counts["ended while they load"] > 0) == (name != "gemma3"), counts
    # Windows that ours keeps, what is found because of that, and ends of prompts inside a block.
    assert (counts["kept"] > 0) == (counts["longer"] > 0) == bool(MODELS[name].windows), counts
    assert (counts["early"] > 0) == (counts["tails"] > 0) == ("fine" in name), counts


def longer_hit(stream: list[Any]) -> str:
    record = next(each for each in stream if isinstance(each, Lookup) and each.found)
    record.found += 32
    return f"hit of {record.state.name} behind {record.computed} tokens: ours {record.found - 32}"


def another_block(stream: list[Any]) -> str:
    record = next(each for each in stream if isinstance(each, Allocated) and each.external)
    table = record.tables[0]
    table[-1] = next(block for block in range(1, 12) if block not in table)
    return "blocks loaded: ours"


def swapped_blocks(stream: list[Any]) -> str:
    record = next(
        after
        for before, after in itertools.pairwise(stream)
        if isinstance(before, Lookup) and before.computed == 0 and before.found > 32
        if isinstance(after, Allocated) and after.external
    )
    table = record.tables[0]
    table[:2] = reversed(table[:2])
    return f"load of {record.state.name}: not the bytes of"


def another_name(stream: list[Any]) -> str:
    put = next(put for each in stream if isinstance(each, Ended) for put in each.puts)
    put.names[0] += "0"
    return f"names stored in the step: ours alone ['{put.names[0][:-1]}'"


@pytest.mark.parametrize("damage", [longer_hit, another_block, swapped_blocks, another_name])
@pytest.mark.parametrize(
    "recorded",
    [pytest.param("llama", marks=pytest.mark.xdist_group("recorded_llama"))],
    indirect=True,
)
def test_a_damaged_record_is_told(
    recorded: tuple[str, Path], damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_record.read(recorded[1])
    message = damage(stream)
    with pytest.raises(AssertionError, match=re.escape(message)):
        replay(stream, monkeypatch, frozenset())
