"""Every bad config says what is wrong, where, and what would have been right."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import kvprism
import numpy as np
import pytest
from configs import attention, config, mamba, ring


def without(group: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != key}


KINDS = ", ".join(kvprism.SpecRegistry.builtin().names())

BAD = {
    "unknown key": (
        config(attention(blok_size=3)),
        "groups[0].blok_size = 3: expected a known key (did you mean 'block_size'?)",
    ),
    "unknown key at the top": (
        config(numblocks=3),
        "numblocks = 3: expected a known key (did you mean 'num_blocks'?)",
    ),
    "unknown parallel size": (config(parallel={"tq": 2}), "parallel.tq = 2: expected a known key"),
    "key of another kind": (
        config(ring(mamba_cache_mode="align")),
        "expected no such key for kind 'circular_buffer'",
    ),
    "missing key": (
        config(without(attention(), "block_size")),
        "groups[0].block_size: expected a positive integer (missing)",
    ),
    "missing kind": (
        config(without(attention(), "kind")),
        f"groups[0].kind: expected one of {KINDS}",
    ),
    "missing mode": (
        config(without(mamba(), "mamba_cache_mode")),
        "groups[0].mamba_cache_mode: expected one of none, align, all (missing)",
    ),
    "missing window": (
        config(attention(kind="sliding_window")),
        "groups[0].sliding_window: expected a positive integer of tokens",
    ),
    "negative size": (
        config(attention(block_size=-8)),
        "groups[0].block_size = -8: expected a positive integer",
    ),
    "zero": (config(num_blocks=0), "num_blocks = 0: expected a positive integer"),
    "only the null block": (config(num_blocks=1), "block 0 is the null block"),
    "float": (config(attention(head_size=64.0)), "groups[0].head_size = 64.0: expected"),
    "string for a number": (config(attention(head_size="64")), 'groups[0].head_size = "64"'),
    "number for a string": (config(kv_layout=3), "kv_layout = 3: expected a layout name"),
    "number for a flag": (
        config(attention(enable_kv_transfer=1)),
        "groups[0].enable_kv_transfer = 1: expected true or false",
    ),
    "list for an object": (config(parallel=[]), "parallel = a list of 0: expected an object"),
    "object for a list": (config(groups={}), "groups = an object: expected a list of groups"),
    "no groups": ({"num_blocks": 4, "groups": []}, "groups = []: expected at least one group"),
    "group that is no object": (config("mamba"), 'groups[0] = "mamba": expected an object'),
    "unknown kind": (
        config(attention(kind="ful_attention")),
        f"expected one of the known kinds: {KINDS} (did you mean 'full_attention'?)",
    ),
    "unknown dtype": (
        config(attention(dtype="bf16")),
        'groups[0].dtype = "bf16": expected one of float32, float16, bfloat16, float8_e4m3fn',
    ),
    "unknown mode": (
        config(mamba(mamba_cache_mode="aligned")),
        "groups[0].mamba_cache_mode = aligned: expected one of none, align, all",
    ),
    "unknown layout": (
        config(kv_layout="LBNHD"),
        "kv_layout = LBNHD: expected one of LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC",
    ),
    "unknown key schema": (
        config(key_schema="vllmm"),
        "key_schema = vllmm: expected one of kvprism, vllm",
    ),
    "duplicate layer": (
        config(attention(), ring(layers=["f0"])),
        "groups[1].layers[0] = f0: expected a layer name used once (also at groups[0].layers[0])",
    ),
    "no layers": (config(attention(layers=[])), "groups[0].layers = []: expected at least one"),
    "empty layer name": (config(attention(layers=[""])), "groups[0].layers[0] = ''"),
    "layer that is no string": (config(attention(layers=[1])), "groups[0].layers[0] = 1"),
    "shape with a zero": (config(mamba(shapes=[[4, 0]])), "groups[0].shapes[0][1] = 0"),
    "more shapes than dtypes": (
        config(mamba(shapes=[[4], [5]])),
        "groups[0].dtypes = 1 entries: expected as many as shapes, 2",
    ),
    "padding below the page": (
        config(attention(page_size_padded=4096)),
        "groups[0].page_size_padded = 4096: expected at least the unpadded page, 409600 bytes",
    ),
    "fewer heads in all than here": (
        config(attention(total_num_kv_heads=1)),
        "groups[0].total_num_kv_heads = 1: expected at least num_kv_heads, 2",
    ),
    "compression of nothing": (
        config(attention(compression=0)),
        "groups[0].compression = 0: expected a positive integer",
    ),
    "rebuild distance without use": (
        config(attention(replay_tokens=8)),
        "groups[0].replay_tokens = 8: expected no rebuild distance for kind 'full_attention'",
    ),
    "window without use": (
        config(attention(sliding_window=8)),
        "groups[0].sliding_window = 8: expected no sliding_window for kind 'full_attention'",
    ),
    "context ranks that do not divide": (
        config(parallel={"tp": 4, "dcp": 3}),
        "parallel.dcp = 3: expected a divisor of tp, 4",
    ),
    "window over context ranks": (
        config(attention(kind="sliding_window", sliding_window=8), parallel={"tp": 2, "dcp": 2}),
        "groups[0].kind = sliding_window: expected a kind without a window, or parallel.dcp of 1",
    ),
    "engine's size of zero": (config(hash_block_size=0), "hash_block_size = 0: expected"),
    "long namespace": (config(namespace="n" * 129), "namespace = 129 bytes: expected at most 128"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_config_is_told_with_path_value_and_expectation(name: str) -> None:
    value, message = BAD[name]
    with pytest.raises(kvprism.ConfigError) as raised:
        kvprism.CacheConfig.from_dict(value)
    assert message in str(raised.value)
    assert len(raised.value.problems) == 1, raised.value.problems


def test_every_problem_comes_at_once() -> None:
    bad = config(attention(block_size=0, dtype="x"), mamba(shapes=3), num_blocks="16", kv_layot="")
    with pytest.raises(kvprism.Error) as raised:
        kvprism.CacheConfig.from_dict(bad)
    assert {problem.path for problem in raised.value.problems} == {
        "num_blocks",
        "kv_layot",
        "groups[0].block_size",
        "groups[0].dtype",
        "groups[1].shapes",
    }
    assert "5 problems" in str(raised.value)


def test_an_error_is_a_value_error_with_a_code() -> None:
    with pytest.raises(ValueError, match="num_blocks") as raised:
        kvprism.CacheConfig.from_dict({})
    assert isinstance(raised.value, kvprism.Error)
    assert raised.value.code == "invalid_config"
    first = raised.value.problems[0]
    assert (first.path, first.expected, first.hint) == (
        "num_blocks",
        "a positive integer",
        "missing",
    )


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "line 1, column 1"),
        ("{", "line 1, column 2"),
        ('{\n  "num_blocks": 16,\n  oops\n}', "line 3, column 3"),
        ('{"num_blocks": 16,}', "line 1, column 19"),
        ("[]", "top level"),
        ("16", "top level"),
    ],
)
def test_text_that_is_no_config_names_the_place(text: str, where: str) -> None:
    with pytest.raises(kvprism.ConfigError) as raised:
        kvprism.CacheConfig.from_json(text)
    assert raised.value.problems[0].path == where


def test_a_key_given_twice_is_an_error() -> None:
    text = json.dumps(config()).replace('"num_blocks": 16', '"num_blocks": 16, "num_blocks": 17')
    with pytest.raises(kvprism.ConfigError, match="num_blocks = given twice"):
        kvprism.CacheConfig.from_json(text)


def test_missing_file_is_a_lookup_error_naming_the_path(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match=str(tmp_path / "absent.json")) as raised:
        kvprism.CacheConfig.from_file(tmp_path / "absent.json")
    assert raised.value.code == "not_found"  # type: ignore[attr-defined]


def test_directory_is_an_error_naming_the_path(tmp_path: Path) -> None:
    with pytest.raises(kvprism.ConfigError, match="a directory"):
        kvprism.CacheConfig.from_file(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1, column 1"),
        (b'{\n "namespace": "\xff"}', "line 2, column 16"),
        (b"{]", "JSON"),
    ],
    ids=["empty", "invalid UTF-8", "not JSON"],
)
def test_bad_file_is_an_error_naming_path_and_place(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(kvprism.ConfigError, match=message) as raised:
        kvprism.CacheConfig.from_file(path)
    assert str(path) in str(raised.value)


def test_a_file_is_read_like_its_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(namespace="ä")))
    read = kvprism.CacheConfig.from_file(str(path))
    assert read == kvprism.CacheConfig.from_dict(config(namespace="ä"))
    assert read.namespace == "ä"


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (kvprism.ConfigError, ValueError),
        (kvprism.ArgumentError, ValueError),
        (kvprism.NotFoundError, LookupError),
        (kvprism.MismatchError, ValueError),
        (kvprism.UnsupportedError, NotImplementedError),
        (kvprism.UnavailableError, ConnectionError),
        (kvprism.TimedOutError, TimeoutError),
        (kvprism.ClosedError, ValueError),
    ],
)
def test_every_error_has_a_built_in_base(error: type[kvprism.Error], builtin: type) -> None:
    assert issubclass(error, kvprism.Error)
    assert issubclass(error, builtin)
    made = error("text")
    assert (str(made), made.code, made.problems) == ("text", "", [])


def test_a_file_name_need_not_be_utf8(tmp_path: Path) -> None:
    for name in (tmp_path / os.fsdecode(b"a\xff"), os.fsencode(tmp_path) + b"/a\xff"):
        with pytest.raises(kvprism.NotFoundError, match="a file that can be read"):
            kvprism.CacheConfig.from_file(name)  # type: ignore[arg-type]
    path = tmp_path / os.fsdecode(b"b\xff")
    path.write_text(json.dumps(config()))
    assert kvprism.CacheConfig.from_file(path) == kvprism.CacheConfig.from_dict(config())
    with pytest.raises(kvprism.ConfigError, match="a name without NUL bytes"):
        kvprism.CacheConfig.from_file(f"{path}\0")


def test_a_nul_byte_does_not_end_the_text() -> None:
    with pytest.raises(kvprism.ConfigError, match="a NUL byte: expected JSON text"):
        kvprism.CacheConfig.from_json(json.dumps(config()) + "\0")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (np.int64(3), "groups[1].extra"),
        (b"x", "groups[1].extra"),
        (float("nan"), "groups[1].extra"),
        ({b"x": 1}, "groups[1].extra"),
        ([1, {2}], "groups[1].extra[1]"),
        (nested(100_000), "groups[1].extra[0]"),
        (10**5000, "top level"),
    ],
    ids=["int64", "bytes", "nan", "key", "set", "deep", "digits"],
)
def test_a_dict_that_is_no_json_names_the_key(value: Any, path: str) -> None:
    given = config()
    given["groups"][1]["extra"] = value
    with pytest.raises(kvprism.ConfigError) as raised:
        kvprism.CacheConfig.from_dict(given)
    (problem,) = raised.value.problems
    assert problem.path.startswith(path)
    assert len(problem.value) <= 60


def test_a_dict_that_contains_itself_is_refused() -> None:
    given = config()
    given["groups"].append(given)
    with pytest.raises(kvprism.ConfigError, match="levels"):
        kvprism.CacheConfig.from_dict(given)
