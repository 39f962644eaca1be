"""The page for operators knows every counter, every time bound and every log line it speaks of."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from kvprism.vllm.options import OPTIONS as VLLM_OPTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text("utf-8")
STUB = ast.parse((ROOT / "tests" / "python" / "reference" / "_core.pyi").read_text("utf-8"))
HEADERS = ROOT / "cpp" / "include" / "kvprism"
HEADER_OF = {
    "StoreSchedulerCounters": "store/store_scheduler.h",
    "LedgerCounters": "job/job_ledger.h",
    "StoreWorkerCounters": "store/store_worker.h",
    "StoreGroupCounters": "store/store_worker.h",
    "BlockingStoreCounters": "backend/blocking_store.h",
    "StoreSchedulerOptions": "store/store_scheduler.h",
    "StoreWorkerOptions": "store/store_worker.h",
    "BlockingStoreOptions": "backend/blocking_store.h",
    "MooncakeOptions": "backend/mooncake_client.h",
    "PumpThreadOptions": "backend/pump_thread.h",
}
COUNTERS = [name for name in HEADER_OF if name.endswith("Counters")]
OPTIONS = [name for name in HEADER_OF if name.endswith("Options")]


@cache
def members(struct: str) -> dict[str, tuple[str, str]]:
    """Name to type and default of a struct in the public headers."""
    text = (HEADERS / HEADER_OF[struct]).read_text("utf-8")
    text = re.sub(r"//[^\n]*", "", text)
    body = text.split(f"struct {struct} {{", 1)[1].split("\n};", 1)[0]
    found: dict[str, tuple[str, str]] = {}
    for statement in body.split(";"):
        line = " ".join(statement.split())
        if not line:
            continue
        match = re.fullmatch(r"([\w:<>, ]+?) (\w+)(?: = (.+)|\{\})?", line)
        assert match is not None, f"{struct}: {line}"
        found[match[2]] = (match[1], match[3] or "")
    return found


def section(title: str) -> str:
    return re.split(r"\n#{2,3} ", PAGE.split(f"# {title}\n", 1)[1], maxsplit=1)[0]


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def duration(text: str) -> str:
    match = re.fullmatch(r"(seconds|milliseconds)\((\d+)\)", text)
    assert match is not None, text
    return f"{match[2]} {'s' if match[1] == 'seconds' else 'ms'}"


def number(text: str) -> int:
    base, _, shift = text.replace("ull", "").replace("u", "").partition(" << ")
    return int(base) << int(shift or 0)


def test_headers_are_read() -> None:
    assert members("StoreWorkerOptions")["rank"] == ("Rank", "")
    assert members("BlockingStoreOptions")["stuck_after"] == ("Duration", "seconds(65)")
    assert members("StoreSchedulerCounters")["ledger"] == ("LedgerCounters", "")
    assert number("64ull << 20") == 64 << 20


@pytest.mark.parametrize("struct", COUNTERS)
def test_every_counter_has_a_row(struct: str) -> None:
    table = rows(section(struct))
    assert [row[0] for row in table] == [f"`{name}`" for name in members(struct)]
    assert all(row[1] for row in table)


def test_names_in_questions_and_stories_exist() -> None:
    known = {name for s in HEADER_OF for name in members(s)}
    for title in ("First questions", "What happens when"):
        spoken_of = set(re.findall(r"`([a-z]+_[a-z_]+)`", section(title)))
        assert spoken_of <= known, spoken_of - known


@pytest.mark.parametrize("struct", OPTIONS)
def test_every_time_option_is_in_the_table_with_its_default(struct: str) -> None:
    listed = {
        row[0].strip("`").split("::")[1]: row[1]
        for row in rows(section("Time bounds"))
        if row[0].startswith(f"`{struct}::")
    }
    defaults = {
        name: duration(default)
        for name, (kind, default) in members(struct).items()
        if kind == "Duration"
    }
    assert listed == defaults


def keywords(function: str) -> set[str]:
    """Names of what a function of the bindings takes by keyword; of a class, its construction."""
    (node,) = (
        node
        for node in STUB.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == function
    )
    if isinstance(node, ast.ClassDef):
        (node,) = (
            inner
            for inner in node.body
            if isinstance(inner, ast.FunctionDef) and inner.name == "__init__"
        )
    return {argument.arg for argument in node.args.kwonlyargs}


def test_time_options_can_be_set_where_the_page_says_so() -> None:
    bounds = section("Time bounds")
    options = [row[0].strip("`").split("::") for row in rows(bounds)]
    settable = {
        f"{name}_seconds": struct
        for struct, name in options
        if struct in ("StoreSchedulerOptions", "MooncakeOptions") or name == "setup_timeout"
    }
    takes = {
        "StoreSchedulerOptions": keywords("StoreScheduler"),
        "MooncakeOptions": keywords("mooncake_store"),
        "BlockingStoreOptions": keywords("mooncake_store"),
    }
    assert [name for name, struct in settable.items() if name not in takes[struct]] == []
    all_taken = takes["StoreSchedulerOptions"] | takes["MooncakeOptions"]
    others = {f"{name}_seconds" for _, name in options} - set(settable)
    assert others & all_taken == set()

    (sentence,) = re.findall(r"The connector has no options for ([^.]+) either\.", bounds)
    in_vllm = {option.name for option in VLLM_OPTIONS}
    assert {f"{name}_seconds" for name in re.findall(r"`(\w+)`", sentence)} == set(
        settable
    ) - in_vllm
    assert others & in_vllm == set()


def test_numbers_beside_options_are_their_defaults() -> None:
    units = {"": 1, " MiB": 1 << 20}
    options = {name: value for s in OPTIONS for name, (_, value) in members(s).items()}
    # The client has a limit of its own, by the same name as the worker's.
    options["max_bytes_per_call"] = members("StoreWorkerOptions")["max_bytes_per_call"][1]
    spoken_of = re.findall(r"`(\w+)` \(?([\d,]+)( MiB)?\b", PAGE)
    assert len(spoken_of) >= 8
    for name, value, unit in spoken_of:
        assert int(value.replace(",", "")) * units[unit] == number(options[name]), name


def test_log_lines_are_those_of_the_sources() -> None:
    sources = "".join(
        path.read_text("utf-8") for path in sorted((ROOT / "cpp" / "src").rglob("*.cpp"))
    )
    # Adjacent literals are one text.
    sources = re.sub(r'"\s*\n\s*"', "", sources)
    table = rows(section("Log lines"))
    for line in table:
        for part in re.findall(r"`([^`]+)`", line[0]):
            assert part in sources, part
    told = "".join(re.findall(r"`[^`]+`", "".join(row[0] for row in table)))
    for statement in re.findall(r"\blog\(\s*LogLevel::k\w+,(.*?);", sources, re.DOTALL):
        texts = re.findall(r'"([^"]{6,})"', statement)
        assert any(text.split("{}")[0].strip() in told for text in texts), statement
