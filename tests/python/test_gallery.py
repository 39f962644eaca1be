"""Real hybrid models: what vLLM's own classes make of them is what kvprism makes of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kvprism
import pytest
from kvprism import CacheConfig, CacheTensor, GroupId, Projection, SegmentMap, StoreIndex
from kvprism.cli import main

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "gallery"
PAGE = (ROOT / "docs" / "gallery.md").read_text("utf-8")

# Transferable groups, storable groups, S = h in tokens, and the bytes of a block's pages in each
# group: as vLLM 0.32's KVCacheConfig, resolve_kv_cache_block_sizes and page sizes have them.
EXPECTED: dict[str, tuple[list[int], list[int], int, list[int]]] = {
    "gemma-3-27b": (
        [*range(7)],
        [*range(7)],
        16,
        [1179648, 1179648, 1179648, 1179648, 1048576, 1048576, 1310720],
    ),
    "gpt-oss-120b": ([0, 1], [0, 1], 16, [589824, 589824]),
    "qwen3-next-80b-a3b": (
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        544,
        [13369344, 13369344, 13369344, 13369344],
    ),
    "falcon-h1-7b": ([0, 1], [0, 1], 1568, [70647808, 70647808]),
    "deepseek-v3": ([0], [0], 64, [4497408]),
    "deepseek-v3.2": ([0], [0], 64, [3076352]),
    "llama-4-scout": ([0, 1, 2, 3], [0, 1, 2, 3], 16, [786432, 786432, 786432, 786432]),
    "jamba-1.5-mini": ([*range(8)], [*range(8)], 80, [1310720] * 8),
    "nemotron-h-8b": ([*range(7)], [*range(7)], 528, [8650752] * 7),
    "minimax-text-01": ([*range(8)], [*range(8)], 1024, [41943040] * 8),
    "kimi-linear-48b-a3b": (
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        1888,
        [15224832, 15224832, 15224832, 13049856],
    ),
    "glm-5-next": (
        [*range(6)],
        [*range(5)],
        4352,
        [39075840, 39075840, 34734080, 34734080, 49415872, 90112],
    ),
    "qsa-hybrid": ([*range(5)], [0, 1, 2, 3], 800, [4390912, 4390912, 4390912, 6758400, 8960]),
}
# Bytes of an object, where pages are padded: as vLLM's real_page_size_bytes has them.
CONTENT = {
    "qwen3-next-80b-a3b": [13369344, *[12 * (3 * 8192 + 32 * 128 * 128) * 2] * 3],
    "falcon-h1-7b": [70647808, 70152192],
    "jamba-1.5-mini": [1310720, *[1245184] * 7],
    "nemotron-h-8b": [8650752, *[8634368] * 6],
    "kimi-linear-48b-a3b": [15224832, 15196160, 15196160, 13025280],
}


def objects_of(name: str) -> list[int]:
    return CONTENT.get(name, EXPECTED[name][3])


def load(name: str) -> tuple[dict[str, Any], Projection]:
    config = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return config, Projection(CacheConfig.from_dict(config))


def test_every_file_is_in_the_gallery() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(EXPECTED)
    assert re.findall(r"^## (.*)$", PAGE, re.MULTILINE) == list(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_projections_are_those_of_the_engine(name: str) -> None:
    transfer, store, size, pages = EXPECTED[name]
    _, projection = load(name)
    assert [int(group) for group in projection.transfer_group_ids] == transfer
    assert [int(group) for group in projection.store_group_ids] == store
    assert (projection.scheduler_block_size, projection.hash_block_size) == (size, size)
    assert [sum(group.layer_page_bytes) for group in projection.groups()] == pages
    assert [group.object_bytes for group in projection.groups()] == objects_of(name)
    assert kvprism.validate_store(projection) == []
    assert kvprism.validate_peer(projection) == []


@pytest.mark.parametrize("name", EXPECTED)
def test_the_page_shows_what_inspect_prints(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["inspect", f"examples/gallery/{name}.json"]) == 0
    shown = re.search(rf"^## {re.escape(name)}\n.*?```\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    assert shown is not None
    assert capsys.readouterr().out == shown.group(1)


def place(config: dict[str, Any], projection: Projection, base: int) -> list[CacheTensor]:
    """One allocation that every group overlays from byte 0, as vLLM lays it out."""
    blocks = config["num_blocks"]
    rows = config["kv_layout"].startswith("B")
    widest = max(sum(group.layer_page_bytes) for group in projection.groups())
    tensors = []
    for group, described in zip(projection.groups(), config["groups"], strict=True):
        pages = dict(zip(group.layers, group.layer_page_bytes, strict=True))
        offset = 0
        for member in described.get("members", [described]):
            layers = member["layers"]
            page = pages[layers[0]]
            layer_stride = page if rows else page * blocks
            tensors.append(
                CacheTensor(
                    base,
                    bytes=widest * blocks,
                    layers=layers,
                    layer_stride=layer_stride,
                    block_stride=widest if rows else page,
                    offset=offset,
                    device=0,
                )
            )
            offset += layer_stride * len(layers)
    return tensors


@pytest.mark.parametrize("name", EXPECTED)
def test_every_block_has_a_place(name: str) -> None:
    _, store, _, pages = EXPECTED[name]
    objects = objects_of(name)
    config, projection = load(name)
    base = 1 << 40
    segments = SegmentMap(projection, place(config, projection, base))
    for index, group in enumerate(store):
        assert segments.object_bytes(StoreIndex(index)) == objects[group]
    widest = max(pages)
    last = config["num_blocks"] - 1
    for group in range(len(objects)):
        found = segments.segments(GroupId(group), last)
        assert sum(length for _, length in found) == objects[group]
        # Blocks outermost: what lies side by side moves as one, unless a wrapper's order differs or
        # padding lies between.
        alone = "members" not in config["groups"][group] and objects[group] == pages[group]
        if config["kv_layout"].startswith("B") and alone:
            assert found == [(base + last * widest, objects[group])]
