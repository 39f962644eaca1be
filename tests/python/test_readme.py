"""What README shows is what the examples do, and what it links to is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("language", "example"),
    [("python", "examples/python/quickstart.py"), ("cpp", "examples/cpp/quickstart.cpp")],
)
def test_code_is_an_excerpt_of_the_example(language: str, example: str) -> None:
    (code,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code in (ROOT / example).read_text()
    assert len([line for line in code.splitlines() if line]) <= 15


def test_make_targets_exist() -> None:
    names = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
            assert target in names, f"{page.name}: make {target}"
