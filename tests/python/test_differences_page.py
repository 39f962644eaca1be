"""The page on differences names tests that exist, and counted rows are counted."""

from __future__ import annotations

import ast
import re

import pytest
from test_failures_page import ROOT, exists, named

PAGE = (ROOT / "docs" / "differences.md").read_text("utf-8")
ROWS = {
    cells[0]: cells[1:]
    for line in PAGE.splitlines()
    if re.match(r"\| D\d+ \|", line)
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}


def is_there(name: str) -> bool:
    return (ROOT / name).is_file() if "/" in name else exists(name)


def test_rows_are_numbered_without_a_gap() -> None:
    assert list(ROWS) == [f"D{number}" for number in range(1, len(ROWS) + 1)]


@pytest.mark.parametrize("row", ROWS)
def test_row(row: str) -> None:
    *texts, shown = ROWS[row]
    assert len(texts) == 3
    assert all(text.endswith(".") for text in texts)
    assert named(shown), "a row names a test"
    assert [name for name in named(shown) if not is_there(name)] == []


def test_what_the_page_calls_counted_must_be_met_by_a_full_comparison() -> None:
    tree = ast.parse((ROOT / "tests/oracle/compare.py").read_text("utf-8"))
    (required,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DIFFERENCES"
    )
    counted = [row for row, cells in ROWS.items() if re.search(r"\bcounted\b", cells[-1])]
    assert list(required) == counted


def test_every_row_that_the_tree_cites_is_there() -> None:
    cited = set()
    for folder in ("cpp", "python", "tests", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".h", ".cpp", ".py", ".md"} and path.is_file():
                cited |= set(re.findall(r"\bD\d+\b(?=[).,;: ])", path.read_text("utf-8")))
    assert cited <= set(ROWS), cited - set(ROWS)
