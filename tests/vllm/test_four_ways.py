"""No connector, cold, warm in a new process, and warm with every loaded byte damaged.

Tokens of the first three are the same, and those of the last differ: the cache matters, and what
comes from the store is right. vLLM's own store connector serves the same prompts beside it. Two of
the models have a scratch ring in every layer, which may never enter the store.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import conftest
import harness
import pytest
from harness import Engine
from kvprism.local_mooncake import LocalMooncake, open_local

ATTENTION = {"block_size": 32}
STATES = {"dtype": "bfloat16", "mamba_cache_mode": "align"}
# Engine options, and tokens of the four prompts that whole blocks hold.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "llama": (ATTENTION, 2432),
    "llama_tp2": (ATTENTION | {"tensor_parallel_size": 2}, 2432),
    "gemma3": (ATTENTION, 2432),
    "qwen3next": (STATES, 2048),
    # Hits end inside the large blocks of the states, on multiples of 32.
    "qwen3next_fine": (STATES | {"prefix_match_unit": 32}, 2432),
    "ring_llama": (ATTENTION, 2432),
    "ring_qwen3next": (STATES, 2048),
}
LONG = {"qwen3next_fine": [pytest.mark.soak]}
BUILTIN = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}


@dataclass
class Runs:
    """What the engines of one model did."""

    name: str
    none: dict[str, Any]
    cold: dict[str, Any]
    warm: dict[str, Any]
    damaged: dict[str, Any]
    builtin: dict[str, Any] | harness.EngineError
    expected_hits: int
    objects: dict[str, bytes]
    ring_pieces: list[bytes]


def keys_of(mooncake: LocalMooncake) -> set[str]:
    """The keys of all objects, as the master tells them."""
    with open_local(f"http://{mooncake.metrics}/get_all_keys") as answer:
        return set(answer.read().decode().split())


def objects_of(mooncake: LocalMooncake) -> dict[str, bytes]:
    """Every object in the pool, none of them empty, by a client that knows nothing of kvprism."""
    from mooncake.store import MooncakeDistributedStore

    keys = keys_of(mooncake)
    client = MooncakeDistributedStore()
    status = client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", mooncake.master)
    assert status == 0
    try:
        objects = {key: client.get(key) for key in keys}
    finally:
        client.close()
    assert all(objects.values()), "an object could not be read"
    return objects


def ring_pieces(file: Path) -> list[bytes]:
    """What an engine has written of its rings' rows."""
    content = file.read_bytes()
    return [content[at : at + 32] for at in range(0, len(content), 32)]


def pieces_in(objects: dict[str, bytes], pieces: list[bytes]) -> list[bytes]:
    """Those of the pieces that lie somewhere in the objects."""
    store = b"\0".join(objects.values())
    return [piece for piece in pieces if piece in store]


def builtin_environment(mooncake: LocalMooncake, folder: Path) -> dict[str, str]:
    file = folder / "mooncake.json"
    content = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": mooncake.master,
        "protocol": "tcp",
        "device_name": "",
        "mode": "standalone-store",
        "global_segment_size": 0,
        "local_buffer_size": "64mb",
    }
    file.write_text(json.dumps(content))
    return {"MOONCAKE_CONFIG_PATH": str(file)}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.xdist_group(name), *LONG.get(name, ())])
        for name in MODELS
    ],
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    name = request.param
    engine, expected = MODELS[name]
    path = conftest.model(name.removesuffix("_fine").removesuffix("_tp2"))
    folder = tmp_path_factory.mktemp(name)
    pieces_file = folder / "pieces" if "ring" in name else None
    environment = {"RING_RECORD": "1"} if pieces_file else {}

    def run(
        engines: list[Engine], *, abrupt: bool = False, **variables: str
    ) -> list[dict[str, Any]]:
        return harness.run_engines(
            path, engines, engine=engine, environment=environment | variables, abrupt=abrupt
        )

    with harness.patient_mooncake() as mooncake:
        ours = harness.kvprism_connector(mooncake.master)
        damaging = ours | {
            "kv_connector": "DamagingConnector",
            "kv_connector_module_path": "damaging",
        }
        none, cold = run([Engine(), Engine(ours, ring_pieces=str(pieces_file or ""))])
        objects = objects_of(mooncake)
        # Tensor ranks are forked, which a process that has used Mooncake must not be.
        (warm,) = run([Engine(ours)])
        (damaged,) = run([Engine(damaging)])
    with harness.patient_mooncake() as mooncake:
        twice = Engine(BUILTIN, rounds=[harness.prompts()] * 2, reset=True)
        builtin: Any
        try:
            (builtin,) = run([twice], abrupt=True, **builtin_environment(mooncake, folder))
        except harness.EngineError as error:
            builtin = error
    pieces = ring_pieces(pieces_file) if pieces_file else []
    return Runs(name, none, cold, warm, damaged, builtin, expected, objects, pieces)


def test_an_empty_store_is_filled(runs: Runs) -> None:
    assert harness.hits(runs.cold) == 0
    counters = runs.cold["counters"]
    assert counters["saved_objects"] >= len(runs.objects) > 0
    assert counters["save_chunks_failed"] == 0
    assert sum(map(len, runs.objects.values())) > 0


def test_a_new_process_continues_from_the_store(runs: Runs) -> None:
    assert sum(len(prompt) for prompt in harness.prompts()) == 2502
    assert harness.hits(runs.warm) == runs.expected_hits
    assert runs.warm["counters"]["loads_failed"] == 0
    assert runs.warm["counters"]["loaded_tokens"] == runs.expected_hits


def test_the_built_in_connector_finds_no_more(runs: Runs) -> None:
    assert not isinstance(runs.builtin, harness.EngineError), runs.builtin
    assert harness.tokens(runs.builtin, 1) == harness.tokens(runs.none)
    assert harness.hits(runs.warm) >= harness.hits(runs.builtin, 1)


def test_the_answers_are_those_of_an_engine_without_a_store(runs: Runs) -> None:
    assert harness.tokens(runs.cold) == harness.tokens(runs.none)
    assert harness.tokens(runs.warm) == harness.tokens(runs.none)
    for run in (runs.cold, runs.warm):
        assert harness.largest_logprob_difference(run, runs.none) <= 1e-5


def test_every_tensor_rank_stores_and_loads(runs: Runs) -> None:
    if "tp2" not in runs.name:
        pytest.skip("one rank")
    assert runs.cold["counters"]["saved_objects"] == 2 * 76
    assert runs.warm["counters"]["loaded_objects"] == 2 * 76
    # Nine blocks are common to all four prompts.
    assert len(runs.objects) == 2 * (76 - 3 * 9)


def test_damage_to_the_loaded_bytes_would_be_seen(runs: Runs) -> None:
    assert harness.hits(runs.damaged) == runs.expected_hits
    pairs = zip(harness.tokens(runs.damaged), harness.tokens(runs.none), strict=True)
    assert sum(ours != theirs for ours, theirs in pairs) >= 3


def test_no_scratch_is_in_the_store(runs: Runs) -> None:
    if "ring" not in runs.name:
        pytest.skip("no ring in this model")
    assert len(runs.ring_pieces) > 100
    assert runs.cold["rings"] > 0, "the search finds nothing where there is something"
    assert not pieces_in(runs.objects, runs.ring_pieces)
