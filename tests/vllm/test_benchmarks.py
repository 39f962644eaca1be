"""The benchmarks run, at sizes that say nothing, and have a row of each arm."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path

import harness
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "vllm"


def rows(text: str) -> list[str]:
    """The lines of a table, each without its figures."""
    return [line[:32].strip() for line in text.splitlines()]


def test_the_bench_of_the_scheduler() -> None:
    sizes = ["--requests", "2", "--blocks", "8", "--chunk", "2", "--decode", "4"]
    with tempfile.TemporaryFile("w+") as order, tempfile.TemporaryFile("w+") as log:
        json.dump(["scheduler_bench", *sizes], order)
        order.seek(0)
        script = Path(__file__).with_name("bench_run.py")
        files = (order.fileno(), log.fileno(), log.fileno())
        status = harness.EngineProcess(script, *files, {}).wait(300)
        log.seek(0)
        text = log.read()
    assert status == 0, text
    arms = {"built-in", "built-in, set for list", "kvprism"}
    assert {f"{phase}, {arm}" for phase in ("new", "chunk", "decode") for arm in arms} <= set(
        rows(text)
    )
    results = json.loads(text.splitlines()[-1])["results"]
    assert results.keys() == arms
    assert all(arm["decode"]["steps"] == 4 for arm in results.values())
    assert all(arm["chunk"]["bytes"] > 0 for arm in results.values())


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "arguments", "arms"),
    [
        ("lookup_bench", ["--sizes", "4,8", "--rounds", "2"], {"built-in", "kvprism"}),
        (
            "first_token",
            ["--tokens", "500", "--rounds", "2", "--default-queue"],
            {"no store", "built-in, queue raised", "kvprism", "built-in, default queue"},
        ),
    ],
)
def test_the_benches_with_engines(
    name: str,
    arguments: list[str],
    arms: set[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    assert importlib.import_module(name).main() == 0
    text = capfd.readouterr().out
    assert "DIFFERENT" not in text
    assert json.loads(text.splitlines()[-1])["results"].keys() == arms
