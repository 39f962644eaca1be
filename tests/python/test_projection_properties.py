"""Projections of any mix of groups: ordered subsets, and indices that never change their space."""

from __future__ import annotations

import math
from typing import Any

import kvprism
import pytest
from configs import attention, config, mamba, ring
from hypothesis import given, settings
from hypothesis import strategies as st
from kvprism import GroupId, Projection, StoreIndex, TransferIndex

sizes = st.sampled_from([16, 32, 48, 64])
groups = st.one_of(
    st.builds(lambda size: attention(block_size=size), sizes),
    st.builds(
        lambda size, window: attention(
            kind="sliding_window", block_size=size, sliding_window=window
        ),
        sizes,
        st.integers(1, 200),
    ),
    st.builds(lambda size: mamba(block_size=size), sizes),
    st.builds(lambda size: ring(block_size=size), st.sampled_from([4, 6, 8])),
)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    drawn = draw(st.lists(groups, min_size=1, max_size=8))
    for at, group in enumerate(drawn):
        group["layers"] = [f"layer.{at}"]
        group["enable_kv_transfer"] = draw(st.booleans())
        group["is_eagle_group"] = draw(st.booleans())
    return config(*drawn)


def project(value: dict[str, Any]) -> Projection:
    return Projection(kvprism.CacheConfig.from_dict(value))


def stored(group: dict[str, Any]) -> bool:
    return group["enable_kv_transfer"] and group["kind"] != "circular_buffer"


@given(configs())
def test_store_is_within_transfer_is_within_all(value: dict[str, Any]) -> None:
    projection = project(value)
    transfer = [int(group) for group in projection.transfer_group_ids]
    store = [int(group) for group in projection.store_group_ids]
    given = value["groups"]
    assert transfer == [g for g, group in enumerate(given) if group["enable_kv_transfer"]]
    assert store == [g for g, group in enumerate(given) if stored(group)]
    assert projection.num_groups == len(given)
    assert projection.num_transfer_groups == len(transfer)
    assert projection.num_store_groups == len(store)


@given(configs())
def test_indices_round_trip(value: dict[str, Any]) -> None:
    projection = project(value)
    for row in projection.groups():
        for index, back in (
            (projection.transfer_index(row.id), projection.transfer_index),
            (projection.store_index(row.id), projection.store_index),
        ):
            if index is not None:
                assert projection.group_id(index) == row.id
                assert back(projection.group_id(index)) == index
                assert projection.group(index).id == row.id
        assert (row.store_index is None) == bool(row.why_not_stored)
        assert row.store_index is None or row.transfer_index is not None


@given(configs())
def test_sizes_come_from_store_groups(value: dict[str, Any]) -> None:
    projection = project(value)
    of_store = [group["block_size"] for group in value["groups"] if stored(group)]
    tokens = of_store or [group["block_size"] for group in value["groups"]]
    assert projection.scheduler_block_size == math.lcm(*tokens)
    assert projection.hash_block_size == math.gcd(*tokens)
    assert (kvprism.validate_store(projection) == []) == bool(of_store)


@given(configs(), st.integers(0, 5000))
def test_a_hit_leaves_something_to_compute(value: dict[str, Any], prompt: int) -> None:
    projection = project(value)
    hit = projection.max_hit(prompt)
    assert hit % projection.scheduler_block_size == 0
    assert hit == 0 or hit <= prompt - projection.replay_tokens
    assert hit + projection.scheduler_block_size > prompt - projection.replay_tokens


@given(configs())
def test_json_form_round_trips(value: dict[str, Any]) -> None:
    read = kvprism.CacheConfig.from_dict(value)
    assert kvprism.CacheConfig.from_json(read.to_json()) == read
    assert kvprism.CacheConfig.from_dict(read.to_dict()) == read
    assert Projection(read).digest == project(value).digest


@settings(max_examples=50)
@given(st.text(max_size=40) | st.binary(max_size=40))
def test_no_text_does_more_than_raise(text: str | bytes) -> None:
    raw = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    with pytest.raises(kvprism.Error):
        kvprism.CacheConfig.from_json(raw)


def test_five_groups_of_which_two_are_stored() -> None:
    names = ["a", "b", "c", "d", "e"]
    given = [
        attention(),
        attention(enable_kv_transfer=False),
        ring(),
        mamba(),
        ring(block_size=4),
    ]
    for group, name in zip(given, names, strict=True):
        group["layers"] = [name]
    projection = project(config(*given))
    assert projection.transfer_group_ids == [GroupId(g) for g in (0, 2, 3, 4)]
    assert projection.store_group_ids == [GroupId(0), GroupId(3)]
    assert projection.store_index(GroupId(3)) == StoreIndex(1)
    assert projection.transfer_index(GroupId(3)) == TransferIndex(2)
    assert projection.transfer_index(GroupId(1)) is None


def test_an_index_of_another_space_is_a_type_error() -> None:
    projection = project(config())
    wrong: list[Any] = [0, TransferIndex(0), StoreIndex(0), None, "0", True]
    for value in wrong:
        with pytest.raises(TypeError):
            projection.store_index(value)
        with pytest.raises(TypeError):
            projection.transfer_index(value)
        with pytest.raises(TypeError):
            projection.why_not_stored(value)
    for value in (0, GroupId(0), None):
        with pytest.raises(TypeError):
            projection.group_id(value)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        projection.group(0)  # type: ignore[call-overload]


def test_an_index_out_of_range_is_an_index_error() -> None:
    projection = project(config())
    with pytest.raises(IndexError, match=r"StoreIndex 2 is out of range: there are 2"):
        projection.group(StoreIndex(2))
    with pytest.raises(IndexError, match="GroupId 3"):
        projection.store_index(GroupId(3))


def test_ids_compare_within_their_space_only() -> None:
    assert GroupId(1) == GroupId(1)
    assert GroupId(1) != GroupId(2)
    assert GroupId(1) != StoreIndex(1)
    assert GroupId(1) != 1
    assert GroupId(1) < GroupId(2)
    assert len({GroupId(1), GroupId(1), StoreIndex(1), TransferIndex(1)}) == 3
    assert repr(StoreIndex(3)) == "StoreIndex(3)"
    assert int(GroupId(7)) == GroupId(7).value == 7
    with pytest.raises(TypeError):
        _ = ["a", "b"][GroupId(0)]  # type: ignore[call-overload]


KIND: dict[str, Any] = {
    "name": "pool_tail",
    "payload": "raw",
    "dcp_sharded": False,
    "latent": False,
    "prefix_cacheable": False,
    "hit": "never",
    "window": 0,
    "save": "never",
    "peer": "whole",
    "replay_tokens": 4,
    "fine_grained_lookup": False,
}
TAIL = {"kind": "pool_tail", "layers": ["t"], "block_size": 4, "page_size_bytes": 512}


def test_an_engine_adds_a_kind() -> None:
    registry = kvprism.SpecRegistry.builtin().with_kind(**KIND)
    assert "pool_tail" in registry
    assert "pool_tail" not in kvprism.SpecRegistry.builtin()
    cache = kvprism.CacheConfig.from_dict(config(attention(), TAIL), registry)
    projection = Projection(cache, registry)
    assert projection.store_group_ids == [GroupId(0)]
    assert projection.replay_tokens == 4
    assert projection.group(GroupId(1)).page_size_bytes == 512
    with pytest.raises(kvprism.ConfigError, match="known kinds"):
        Projection(cache)


@pytest.mark.parametrize("left_out", KIND)
def test_a_kind_must_declare_everything(left_out: str) -> None:
    partial = {name: value for name, value in KIND.items() if name != left_out}
    with pytest.raises(TypeError):
        kvprism.SpecRegistry.builtin().with_kind(**partial)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "mamba"}, "a name that is not taken"),
        ({"name": ""}, "a name that is not empty"),
        ({"payload": "blob"}, "one of attention, state, raw"),
        ({"hit": "newer"}, "did you mean 'never'?"),
        ({"save": "handoff"}, "did you mean 'hand_off'?"),
        ({"peer": "all"}, "one of suffix, window, state, whole, none"),
        ({"window": 4}, "0 for hit rule never"),
        ({"window": None}, "0 for hit rule never"),
        ({"hit": "window", "window": 0}, "a positive integer, or None"),
        ({"window": -4}, "window = -4: expected a whole number from 0 to 4294967295"),
        ({"replay_tokens": 2**32}, "replay_tokens = 4294967296: expected a whole number"),
    ],
)
def test_a_kind_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(kvprism.ArgumentError) as raised:
        kvprism.SpecRegistry.builtin().with_kind(**(KIND | changes))
    assert message in str(raised.value)


def test_a_kind_may_take_its_window_from_the_group() -> None:
    registry = kvprism.SpecRegistry.builtin().with_kind(
        **KIND
        | {"prefix_cacheable": True, "hit": "window", "window": None, "save": "positional"}
        | {"replay_tokens": 0}
    )
    group = TAIL | {"sliding_window": 9}
    projection = Projection(kvprism.CacheConfig.from_dict(config(group), registry), registry)
    assert projection.group(StoreIndex(0)).window == 9


def test_a_mismatch_is_a_table_with_the_row_marked() -> None:
    ours = project(config()).digest_facts
    theirs = project(config(namespace="other")).digest_facts
    marked = [
        line for line in Projection.describe_mismatch(ours, theirs).splitlines() if "->" in line
    ]
    assert len(marked) == 1
    assert marked[0].split() == ["->", "namespace", "other"]
