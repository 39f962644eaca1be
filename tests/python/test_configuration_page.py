"""The page on configuration shows what the program does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kvprism
import pytest
from kvprism.cli import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text("utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_example_prints_what_the_page_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cache.json"
    path.write_text(block("json"))
    assert main(["inspect", str(path)]) == 0
    shown = PAGE.split("$ kvprism inspect cache.json\n")[1].split("```")[0]
    assert capsys.readouterr().out == shown


def test_every_key_is_described() -> None:
    config = kvprism.CacheConfig.from_json(block("json"))
    keys = set(config.to_dict())
    for group in config.to_dict()["groups"]:
        keys |= set(group)
    keys |= {"page_size_bytes", *json.loads(block("json"))["parallel"]}
    described = set(re.findall(r"`([a-z_]+)`", PAGE))
    assert keys <= described, keys - described


def test_the_kind_that_the_page_adds_is_one() -> None:
    _, code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {"kvprism": kvprism}
    exec(code, names)
    (group,) = names["projection"].groups()
    assert (group.kind, group.hit, group.window) == ("pooled_keys", "chunk", 128)
    assert group.store_index is not None
