"""No connector, cold, warm in a new process, and a warm run whose loaded bytes are damaged.

Tokens of the first three are the same, and the last differs: the cache matters, and is right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import conftest
import harness
import pytest
from kvprism.local_mooncake import LocalMooncake

ENGINES: dict[str, dict[str, Any]] = {
    "llama": {"block_size": 32},
    "gemma3": {"block_size": 32},
    "qwen3next": {"dtype": "bfloat16", "mamba_cache_mode": "align"},
}


@dataclass
class Runs:
    """Runs of one model, over one pool for each connector."""

    name: str
    none: dict[str, Any]
    cold: dict[str, Any]
    warm: dict[str, Any]
    damaged: dict[str, Any]
    builtin: dict[str, Any]


def builtin_connector(mooncake: LocalMooncake, folder: Path) -> dict[str, Any]:
    """The kv-transfer config of vLLM's own connector, and the environment that it wants."""
    file = folder / "mooncake.json"
    file.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": mooncake.master,
                "protocol": "tcp",
                "device_name": "",
                "mode": "standalone-store",
                "global_segment_size": 0,
                "local_buffer_size": "64mb",
            }
        )
    )
    return {"MOONCAKE_CONFIG_PATH": str(file), "MC_FORCE_TCP": "1"}


BUILTIN = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}


@pytest.fixture(scope="module", params=list(ENGINES))
def runs(
    request: pytest.FixtureRequest,
    mooncake: LocalMooncake,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Runs]:
    name = request.param
    path = conftest.model(name)
    rounds = [harness.prompts()]
    ours = harness.kvprism_connector(mooncake.master)
    damaging = ours | {"kv_connector": "DamagingConnector", "kv_connector_module_path": "damaging"}
    engine = ENGINES[name]

    def run(connector: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        return harness.run_engine(path, rounds, engine=engine, connector=connector, **more)

    none = run(None)
    cold, warm, damaged = run(ours), run(ours), run(damaging)
    environment = builtin_connector(mooncake, tmp_path_factory.mktemp("builtin"))
    run(BUILTIN, environment=environment)
    builtin = run(BUILTIN, environment=environment)
    yield Runs(name, none, cold, warm, damaged, builtin)


def test_nothing_comes_from_an_empty_store(runs: Runs) -> None:
    assert harness.hits(runs.cold) == 0
    assert runs.cold["counters"]["saved_objects"] > 0
    assert runs.cold["counters"]["save_chunks_failed"] == 0


def test_a_new_process_continues_from_the_store(runs: Runs) -> None:
    total = sum(len(prompt) for prompt in harness.prompts())
    assert total == 2502
    assert harness.hits(runs.warm) >= harness.hits(runs.builtin) > 1800
    assert runs.warm["counters"]["loads_failed"] == 0
    assert runs.warm["counters"]["loaded_tokens"] == harness.hits(runs.warm)


def test_the_answers_are_those_of_an_engine_without_a_store(runs: Runs) -> None:
    assert harness.tokens(runs.cold) == harness.tokens(runs.none)
    assert harness.tokens(runs.warm) == harness.tokens(runs.none)


def test_damage_to_the_loaded_bytes_would_be_seen(runs: Runs) -> None:
    assert harness.hits(runs.damaged) == harness.hits(runs.warm)
    same = [
        ours == theirs
        for ours, theirs in zip(
            harness.tokens(runs.damaged), harness.tokens(runs.none), strict=True
        )
    ]
    assert same.count(False) >= 3
