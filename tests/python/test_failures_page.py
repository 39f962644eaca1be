"""The page on known failures names tests that exist, and says what is open."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "failures.md").read_text("utf-8")
# The last column may hold pipes in no row, so splitting is enough.
ROWS = {
    cells[0]: cells[1:]
    for line in PAGE.splitlines()
    if re.match(r"\| R\d\d \|", line)
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}
STATES = ("covered", "partly", "open", "out of scope")
LAST = 82


def named(text: str) -> list[str]:
    """What a row names as tests: in backticks, and not an option, a type or a counter."""
    return [
        name for name in re.findall(r"`([^`]+)`", text) if re.search(r"[.:]|^simulation$", name)
    ]


@cache
def cpp_tests() -> frozenset[str]:
    text = "".join(path.read_text("utf-8") for path in sorted((ROOT / "tests/cpp").glob("*.[ch]*")))
    found = re.findall(r"^(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\s*\)", text, re.MULTILINE)
    return frozenset(f"{suite}.{name}" for suite, name in found)


@cache
def python_tests() -> frozenset[str]:
    return frozenset(
        f"{path.name}::{name}"
        for folder in ("tests/python", "tests/vllm")
        for path in (ROOT / folder).glob("test_*.py")
        for name in re.findall(r"^\s*def (test_\w+)\(", path.read_text("utf-8"), re.MULTILINE)
    )


@cache
def mutants() -> frozenset[str]:
    return frozenset(m["id"] for m in json.loads((ROOT / "tests/mutants/mutants.json").read_text()))


def exists(name: str) -> bool:
    if name == "simulation":
        return (ROOT / "tests/cpp/simulation_main.cpp").exists()
    if name.startswith("mutant:"):
        return name.removeprefix("mutant:") in mutants()
    return name in (python_tests() if "::" in name else cpp_tests())


def test_sources_are_read() -> None:
    assert "Projection.ARingTravelsAndIsNeverStored" in cpp_tests()
    assert "StoreConformance.OldBytesStay" in cpp_tests()
    assert "test_failures_page.py::test_sources_are_read" in python_tests()
    assert not exists("Projection.NoSuchTest")
    assert not exists("test_gil.py::test_nothing")
    assert not exists("mutant:nothing")


def test_every_number_has_one_row_or_is_said_to_be_unused() -> None:
    (sentence,) = re.findall(r"\. ([^.]*) are not used\.", " ".join(PAGE.split()))
    unused = re.findall(r"R\d\d", sentence)
    rows = re.findall(r"^\| (R\d\d) \|", PAGE, re.MULTILINE)
    assert sorted(unused + rows) == [f"R{n:02}" for n in range(1, LAST + 1)]


def test_every_number_that_the_tree_cites_has_a_row() -> None:
    cited = set()
    for folder in ("cpp", "bindings", "python", "tests", "third_party", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".h", ".cpp", ".py", ".md", ".json"} and path.is_file():
                if path in (ROOT / "docs/failures.md", Path(__file__).resolve()):
                    continue
                cited |= set(re.findall(r"\bR\d\d\b", path.read_text("utf-8")))
    assert len(cited) > 30
    assert cited <= set(ROWS), cited - set(ROWS)


@pytest.mark.parametrize("number", ROWS)
def test_row(number: str) -> None:
    failure, answer, state, shown = ROWS[number]
    assert failure.endswith(".")
    assert state in STATES
    tests = named(shown)
    assert [name for name in tests if not exists(name)] == []
    if state in ("covered", "partly"):
        assert tests
        assert answer.endswith(".")
    else:
        assert not tests
        assert shown.endswith(".")
    assert ("Open: " in shown) == (state == "partly")
    assert shown.startswith("Not yet covered: ") == (state == "open")


WEAK = {
    cells[0]: cells[1:]
    for line in PAGE.splitlines()
    if re.match(r"\| (W-C|N)\d+ \|", line)
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}


def test_every_weak_spot_of_a_store_has_a_row() -> None:
    ours = [f"W-C{n}" for n in [*range(1, 20), 25, 26, 27]] + ["N1", "N3", "N4", "N5"]
    assert list(WEAK) == ours


@pytest.mark.parametrize("number", WEAK)
def test_weak_spot(number: str) -> None:
    failure, answer, shown = WEAK[number]
    assert failure.endswith(".")
    assert answer.endswith(".")
    assert named(shown)
    assert [name for name in named(shown) if not exists(name)] == []


def test_the_list_at_the_end_is_that_of_the_rows() -> None:
    table = PAGE.split("## Open\n", 1)[1]
    for state in ("open", "partly"):
        listed = re.findall(rf"^\| {state} \| (.*) \|$", table, re.MULTILINE)
        rows = [n for n, row in ROWS.items() if row[2] == state]
        assert listed == ([", ".join(rows)] if rows else [])
