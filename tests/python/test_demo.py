"""``kvprism demo``: what it shows, and that it fails when it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kvprism
import numpy as np
import pytest
from kvprism import demo, local_mooncake, sim
from kvprism.cli import main
from kvprism.demo import audit, engine, report, workload


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "CONVERSATIONS", 2)
    monkeypatch.setattr(workload, "TURNS", 2)
    monkeypatch.setitem(workload.VARIANTS["state"], "num_blocks", 24)
    monkeypatch.setitem(workload.VARIANTS["window"], "num_blocks", 80)


def test_the_working_directory_is_nowhere_imported_from(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)\n")
    ask = "from kvprism import demo; demo._child('state', '127.0.0.1:1', None)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", ask],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # It has come as far as to look for its master.
    assert "the engine of variant state ended with 1" in done.stderr
    assert "127.0.0.1:1" in done.stderr


def check(result: dict[str, Any]) -> None:
    assert result["passed"]
    assert result["failures"] == []
    assert [row["variant"] for row in result["variants"]] == ["state", "window"]
    for row, third in zip(result["variants"], ("mamba", "sliding_window"), strict=True):
        full, ring, other = row["groups"]
        assert [full["kind"], ring["kind"]] == ["full_attention", "circular_buffer"]
        assert other["kind"] == third
        assert ring["transferable"]
        assert not ring["storable"]
        assert ring["objects_stored"] == ring["objects_loaded"] == ring["bytes_verified"] == 0
        for group in (full, other):
            assert group["transferable"]
            assert group["storable"]
            assert group["objects_stored"] > 0
            assert group["bytes_verified"] > 0
            assert group["bytes_mismatched"] == 0
        assert row["bytes_verified"] == sum(group["bytes_verified"] for group in row["groups"])
        assert row["bytes_mismatched"] == 0
        assert row["ring_positions_in_store"] == 0
        assert row["ring_positions_in_memory"] > 0
        assert row["ring_positions_known"] > 1000
        assert 0 < row["loaded_tokens"] < row["prompt_tokens"]
        assert row["save_gb_per_second"] > 0
        assert row["load_gb_per_second"] > 0


@pytest.mark.usefixtures("small")
def test_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--store", "memory", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    check(json.loads(line))

    assert main(["demo", "--store", "memory"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "rings stayed out of the store, and travel only with transfers"
    assert lines[-1].startswith("PASSED  all ")
    assert any(line.split()[:4] == ["circular_buffer", "8", "yes", "no"] for line in lines)


@pytest.mark.mooncake
def test_on_mooncake() -> None:
    # Its servers are on this machine: a proxy is not asked for them.
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:9"}
    for name in ("no_proxy", "NO_PROXY"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "kvprism", "demo", "--json"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    check(result)
    assert result["store"].startswith("mooncake")


@pytest.mark.mooncake
def test_an_engine_that_does_not_end_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho still loading >&2\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(demo, "_CHILD_SECONDS", 2.0)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == (
        "still loading\nkvprism demo: the engine of variant state did not end in 2 s\n"
    )


def _judge(loaded_from: kvprism.ObjectStore, pool: kvprism.MemoryPool) -> report.Row:
    variant = workload.variant("state")
    filled = engine.fill(variant, kvprism.memory_store(pool))
    loaded = engine.load(variant, loaded_from, filled["histories"])
    rings = audit.ring_detector(variant.projection, filled["histories"])
    stored = audit.audit(variant, *audit.pool_objects(pool), rings)
    return report.judge(variant, filled, loaded, stored, rings.patterns)


@pytest.mark.usefixtures("small")
def test_wrong_bytes_are_noticed() -> None:
    pool = kvprism.MemoryPool()
    store = kvprism.inject_faults(kvprism.memory_store(pool), silent_corrupt=1.0)
    row = _judge(store, pool)
    assert row["bytes_mismatched"] > 0
    assert any("loaded bytes are wrong" in text for text in row["failures"])


@pytest.mark.usefixtures("small")
def test_a_store_that_gives_nothing_is_noticed() -> None:
    row = _judge(kvprism.memory_store(), kvprism.MemoryPool())
    assert row["loaded_tokens"] == 0
    assert "nothing was loaded" in row["failures"]
    assert "no object of group mamba was loaded" in row["failures"]


@pytest.mark.usefixtures("small")
def test_the_exit_status_tells_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = engine.load

    def load(variant: workload.Variant, store: kvprism.ObjectStore, texts: Any) -> dict[str, Any]:
        return real(variant, kvprism.memory_store(), texts)

    monkeypatch.setattr(engine, "load", load)
    assert main(["demo", "--store", "memory"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("FAILED  window: ")
    assert main(["demo", "--store", "memory", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["passed"]
    assert "state: nothing was loaded" in result["failures"]


class TestRingDetector:
    """It must find a ring wherever it is, and nothing else."""

    TOKENS = np.arange(100, dtype=np.uint32)

    @pytest.fixture(autouse=True)
    def _small(self, small: None) -> None:
        pass

    def running(self) -> tuple[sim.SimMemory, sim.RingDetector]:
        variant = workload.variant("state")
        own = engine._Engine(variant, kvprism.memory_store())
        own.engine.submit(1, self.TOKENS, 4)
        while own.engine.stats()["generated_tokens"] == 0:
            own.engine.step()
        return own.memory, sim.RingDetector(variant.projection)

    def test_finds_the_ring_of_these_tokens_only(self) -> None:
        memory, rings = self.running()
        assert rings.patterns == 0
        assert rings.count(memory.array()) == 0
        rings.add(self.TOKENS[::-1])
        assert rings.count(memory.array()) == 0
        rings.add(self.TOKENS)
        # Eight positions, two heads, two layers.
        assert rings.count(memory.array()) == 8 * 2 * 2
        # Poisoned with everything else once nobody needs it.
        assert rings.count(bytes(4096)) == 0

    def test_a_ring_in_an_object_is_found(self) -> None:
        memory, rings = self.running()
        rings.add(self.TOKENS)
        variant = workload.variant("state")
        content = bytes(memory.array())
        key = f"kvp1/-/{variant.schema.fingerprint}/0.0.0.0/0/00"
        stored = audit.audit(variant, [key, "kvp1/-/other/0/0/0"], lambda _: content, rings)
        assert stored.ring_positions == 32
        assert stored.wrong_size == [key]
        assert stored.objects == {0: 1, 1: 0}


@pytest.mark.parametrize("command", [["demo"], ["replay", "TRACE", "--store", "mooncake"]])
def test_without_mooncake(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\n')
    monkeypatch.setattr(local_mooncake, "find_installed_mooncake", lambda: None)
    assert main([str(trace) if word == "TRACE" else word for word in command]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err == (
        f"kvprism {command[0]}: Mooncake is not installed:"
        " pip install mooncake-transfer-engine-non-cuda==0.3.13.post1\n"
    )
