"""Steering the store while it runs."""

from __future__ import annotations

import kvprism
import pytest
from store_helpers import BLOCK, Rank, hashes

PROMPT = list(range(3 * BLOCK))


def test_the_mode_changes_while_it_runs() -> None:
    rank = Rank()
    assert rank.scheduler.mode == "read_write"
    rank.scheduler.advanced(1, 3 * BLOCK, hashes(PROMPT))
    assert rank.scheduler.wants_save(1) == (0, 3 * BLOCK)
    rank.scheduler.set_mode("read_only")
    assert rank.scheduler.wants_save(1) is None
    rank.scheduler.set_mode("off")
    assert rank.scheduler.lookup(1, 3 * BLOCK, hashes(PROMPT)) == 0
    assert rank.scheduler.mode == "off"
    rank.scheduler.set_mode("write_only")
    assert rank.scheduler.wants_save(1) == (0, 3 * BLOCK)


def test_an_unknown_mode_is_named() -> None:
    rank = Rank()
    with pytest.raises(kvprism.Error) as caught:
        rank.scheduler.set_mode("readonly")
    assert "mode" in str(caught.value)
    assert "readonly" in str(caught.value)
    assert "read_write, read_only, write_only or off" in str(caught.value)
    assert rank.scheduler.mode == "read_write"


def test_a_request_is_kept_out_until_it_finishes() -> None:
    rank = Rank()
    rank.scheduler.restrict(1, load=False, save=False)
    assert rank.scheduler.lookup(1, 3 * BLOCK, hashes(PROMPT)) == 0
    rank.scheduler.advanced(1, 3 * BLOCK, hashes(PROMPT))
    assert rank.scheduler.wants_save(1) is None
    rank.scheduler.finished(1)
    assert rank.scheduler.lookup(1, 3 * BLOCK, hashes(PROMPT)) is None
    rank.scheduler.advanced(1, 3 * BLOCK, hashes(PROMPT))
    assert rank.scheduler.wants_save(1) == (0, 3 * BLOCK)
