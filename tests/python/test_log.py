"""The library's log lines reach whoever asks."""

from __future__ import annotations

import logging

import kvprism
import pytest
from kvprism.rate_limited import RateLimited
from store_helpers import BLOCK, Rank, hashes


@pytest.fixture(autouse=True)
def _no_earlier_lines() -> None:
    kvprism.take_log_lines()


def quarantine() -> None:
    """Makes the library log: a worker that never answers, and blocks that are held."""
    rank = Rank(save_timeout_seconds=0.001, quarantine_after_seconds=0.001)
    rank.scheduler.advanced(1, BLOCK, hashes(list(range(BLOCK))))
    rank.scheduler.save(1, (0, BLOCK), [[3]])
    assert len(rank.scheduler.end_step()) == 1  # and nobody runs it
    for _ in range(100_000):
        rank.scheduler.end_step()
        if rank.scheduler.counters()["ledger"]["quarantined"]:
            return
    raise AssertionError("no quarantine")


def test_lines_are_kept_until_they_are_taken() -> None:
    quarantine()
    lines = kvprism.take_log_lines()
    assert {level for level, _ in lines} == {"warning"}
    beginnings = [text.split(":")[0] for _, text in lines]
    assert beginnings == [
        "a rank has not told the outcome of a job",
        "the store is degraded",
        "job 1 of request 1 is not quiet after 0 s",
        "the store is degraded",
    ]
    assert kvprism.take_log_lines() == []


def test_lines_go_to_a_logger(caplog: pytest.LogCaptureFixture) -> None:
    quarantine()
    with caplog.at_level(logging.WARNING, logger="kvprism"):
        assert kvprism.forward_log() == 4
        assert kvprism.forward_log() == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 4
    assert "is not quiet after" in caplog.text


def test_a_level_hides_what_is_below() -> None:
    kvprism.set_log_level("error")
    try:
        quarantine()
    finally:
        kvprism.set_log_level("warning")
    assert kvprism.take_log_lines() == []
    with pytest.raises(kvprism.Error, match="level = loud: expected debug, info, warning"):
        kvprism.set_log_level("loud")


def test_a_line_that_floods_is_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    told = RateLimited(logging.getLogger("kvprism"), logging.ERROR, 10.0, clock=lambda: now)
    with caplog.at_level(logging.WARNING, logger="kvprism"):
        for number in range(4):
            told("plan %d was refused", number)
        now = 110.0
        told("plan %d was refused", 4)
        now = 120.0
        told("plan %d was refused", 5)
    assert [record.getMessage() for record in caplog.records] == [
        "plan 0 was refused",
        "plan 4 was refused (and 3 more since the last line)",
        "plan 5 was refused",
    ]
