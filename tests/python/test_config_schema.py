"""The schema of a cache config, the page made of it, and the reader of configs agree."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import kvprism
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "python/kvprism/cache_config.schema.json").read_text("utf-8"))
TOP = SCHEMA["properties"]
GROUP = SCHEMA["$defs"]["group"]["properties"]
PARALLEL = SCHEMA["$defs"]["parallel"]["properties"]

ATTENTION = {"num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}
# A group of each kind that is needed to have every key somewhere.
GROUPS: dict[str, dict[str, Any]] = {
    "full_attention": ATTENTION,
    "sliding_window_mla": ATTENTION | {"sliding_window": 64},
    "chunked_local_attention": ATTENTION | {"attention_chunk_size": 64},
    "rswa": ATTENTION | {"rswa_window": 64},
    "sink_full_attention": ATTENTION | {"sink_len": 16},
    "circular_buffer": ATTENTION,
    "mamba": {"mamba_cache_mode": "align", "shapes": [[4, 8]], "dtypes": ["float32"]},
    "hisparse_hot": {"page_size_bytes": 512, "blocks_per_request": 4},
}
KIND_OF = {
    "sliding_window": "sliding_window_mla",
    "extra_retained_tokens": "sliding_window_mla",
    "bounded_replay": "sliding_window_mla",
    "attention_chunk_size": "chunked_local_attention",
    "rswa_window": "rswa",
    "sink_len": "sink_full_attention",
    "blocks_per_request": "hisparse_hot",
    "page_size_bytes": "hisparse_hot",
    "replay_tokens": "circular_buffer",
} | {key: "mamba" for key, value in GROUP.items() if value["x-table"] == "state"}


def load_generator() -> ModuleType:
    path = ROOT / "scripts/configuration_page.py"
    spec = importlib.util.spec_from_file_location("configuration_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def base(key: str) -> dict[str, Any]:
    """A sound config with a group that may have `key`."""
    kind = KIND_OF.get(key, "full_attention")
    group = {"kind": kind, "layers": ["l0"], "block_size": 16} | GROUPS[kind]
    config = {"num_blocks": 8, "groups": [group]}
    return copy.deepcopy(config)


def places() -> list[tuple[str, str]]:
    """Each key with the path of the object that has it."""
    found = [("", key) for key in TOP]
    found += [("parallel", key) for key in PARALLEL]
    return found + [("groups[0]", key) for key in GROUP if key != "members"]


def schema_of(where: str, key: str) -> dict[str, Any]:
    table: dict[str, Any] = {"": TOP, "parallel": PARALLEL, "groups[0]": GROUP}[where]
    value: dict[str, Any] = table[key]
    return value


def target(config: dict[str, Any], where: str) -> dict[str, Any]:
    if where == "parallel":
        found: dict[str, Any] = config.setdefault("parallel", {})
        return found
    return config["groups"][0] if where else config


def problems(config: dict[str, Any]) -> dict[str, kvprism.Problem]:
    try:
        kvprism.CacheConfig.from_dict(config)
    except kvprism.ConfigError as error:
        return {problem.path: problem for problem in error.problems}
    return {}


def joined(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def test_the_page_is_what_the_schema_says() -> None:
    generator = load_generator()
    page = (ROOT / "docs/configuration.md").read_text("utf-8")
    assert generator.render(page, SCHEMA) == page, "run scripts/configuration_page.py"
    assert {name for _, name, _ in generator.REGION.findall(page)} == set(generator.tables(SCHEMA))


def test_schema_has_every_key_that_the_reader_knows() -> None:
    known: dict[str, set[str]] = {}
    for name in ("cache_config.cpp", "spec_json.cpp"):
        text = (ROOT / "cpp/src/group" / name).read_text("utf-8")
        for array, body in re.findall(r"std::string_view, \d+> (k\w+Keys)\{(.*?)\};", text, re.S):
            known[array] = set(re.findall(r'"(\w+)"', body))
    assert known["kTopKeys"] == set(TOP)
    assert known["kParallelKeys"] == set(PARALLEL)
    others = ("kGroupKeys", "kUniformKeys", "kSpecKeys", "kAttentionKeys", "kStateKeys", "kRawKeys")
    assert set().union(*(known[name] for name in others)) == set(GROUP)


@pytest.mark.parametrize("kind", GROUPS)
def test_bases_are_sound(kind: str) -> None:
    group = {"kind": kind, "layers": ["l0"], "block_size": 16} | GROUPS[kind]
    assert problems({"num_blocks": 8, "groups": [group]}) == {}


@pytest.mark.parametrize(("where", "key"), places())
def test_type(where: str, key: str) -> None:
    schema = schema_of(where, key)
    path = joined(where, key)
    config = base(key)
    # Of no type that any key has, but for `parallel`.
    target(config, where)[key] = {"a": 1} if "$ref" not in schema else 7
    found = problems(config)
    assert any(each == path or each.startswith(path) for each in found), found
    types = schema.get("type", "object")
    nullable = "null" in types
    config = base(key)
    target(config, where)[key] = None
    required = key in SCHEMA["required"] or schema.get("x-required") or key == "kind"
    if nullable or not required:
        assert path not in problems(config)
    else:
        assert path in problems(config)


@pytest.mark.parametrize(("where", "key"), places())
def test_smallest_value(where: str, key: str) -> None:
    schema = schema_of(where, key)
    if "minimum" not in schema:
        return
    path = joined(where, key)
    config = base(key)
    target(config, where)[key] = schema["minimum"] - 1
    assert path in problems(config)
    config = base(key)
    target(config, where)[key] = schema["minimum"]
    if path in (found := problems(config)):
        # Another rule may forbid the value here, but not the reader.
        assert "integer of at least" not in found[path].expected
        assert found[path].expected != "a positive integer"


@pytest.mark.parametrize(("where", "key"), places())
def test_default(where: str, key: str) -> None:
    schema = schema_of(where, key)
    path = joined(where, key)
    config = base(key)
    target(config, where).pop(key, None)
    if key in SCHEMA["required"] or schema.get("x-required") or key == "kind":
        assert path in problems(config)
        return
    assert path not in problems(config)
    read = kvprism.CacheConfig.from_dict(config).to_dict()
    if "default" in schema and key != "parallel":
        value = target(read, where)[key]
        assert (value or 0) == (schema["default"] or 0), value


@pytest.mark.parametrize(("where", "key"), places())
def test_words(where: str, key: str) -> None:
    schema = schema_of(where, key)
    for word in schema.get("enum", []):
        config = base(key)
        target(config, where)[key] = word
        if key == "dtype":
            target(config, where)["head_size"] = 64
        found = problems(config)
        assert joined(where, key) not in found, found
    if "enum" in schema:
        config = base(key)
        target(config, where)[key] = "nonsense"
        found = problems(config)
        assert joined(where, key) in found
        told = found[joined(where, key)].expected
        assert all(word in told for word in schema["enum"]), told
