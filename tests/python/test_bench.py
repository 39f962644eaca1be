"""The benchmark of the core runs and tells every row; what it measures is nobody's pass mark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvprism.local_mooncake import LocalMooncake

PROGRAM = Path(__file__).parents[2] / "build" / "release" / "bin" / "core_bench"
# Each part beside its floors.
ROWS = {
    "keys/1024": {"memcpy of the same bytes"},
    "keys/16384": {"memcpy of the same bytes"},
    "hit search/1024": {"one look at each prefix flag"},
    "hit search/16384": {"one look at each prefix flag"},
    "plan encode+decode/128": {"memcpy of the same bytes"},
    "plan encode+decode/16384": {"memcpy of the same bytes"},
    "segments/1024x32": {"address and length of each"},
    "save to memory": {"bare put of a prebuilt batch", "memcpy of the same bytes"},
    "load from memory": {"bare get of a prebuilt batch", "memcpy of the same bytes"},
    "save to Mooncake": {"Mooncake's put of a prebuilt batch", "memcpy of the same bytes"},
    "load from Mooncake": {"Mooncake's get of a prebuilt batch", "memcpy of the same bytes"},
}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    # The library is looked for beside the python3 in PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    quiet = {"PATH": path, "MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "ERROR"}
    quiet["MC_TCP_BIND_ADDRESS"] = "127.0.0.1"
    return subprocess.run(
        [str(PROGRAM), *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | quiet,
    )


@pytest.mark.mooncake
def test_every_part_stands_beside_its_floors(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    with LocalMooncake(storage_bytes=256 << 20) as mooncake:
        done = run(
            *("--pairs", "3", "--sample-ms", "0.1", "--json", str(file)),
            *("--commit", "abc", "--mooncake", mooncake.master),
        )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(file.read_text())
    floors: dict[str, set[str]] = {}
    for row in told["comparisons"]:
        floors.setdefault(row["name"], set()).add(row["floor"])
        assert row["ours_ns_per_item"] > 0
        assert row["floor_ns_per_item"] > 0
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["void"] == (not 0.97 <= row["control"] <= 1.03)
        assert row["pairs"] == 3
    assert floors == ROWS


def test_wrong_options_are_all_named() -> None:
    done = run("--pairs", "two", "--sample_ms", "1", "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "core_bench: --pairs = two: expected 3 or more",
        "core_bench: --sample_ms: expected --json, --commit, --mooncake, --pairs or --sample-ms",
        "core_bench: --json: expected a value behind it",
    ]
