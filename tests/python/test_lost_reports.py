"""What becomes of a worker's jobs whose report never arrives (W-C25)."""

from __future__ import annotations

import time

import kvprism
import pytest
from store_helpers import BLOCK, Rank, hashes

TOKENS = list(range(2 * BLOCK))
BOUND_SECONDS = 60.0


def save(rank: Rank) -> kvprism.StepPlan:
    """The plan of a save of two blocks."""
    rank.scheduler.advanced(1, len(TOKENS), hashes(TOKENS))
    rank.scheduler.save(1, (0, len(TOKENS)), [[3, 1]])
    plan = rank.scheduler.end_step()
    assert len(plan) == 1
    rank.scheduler.finished(1)
    assert sorted(rank.scheduler.take_acquired()) == [1, 3]
    return plan


@pytest.mark.parametrize("lost", ["report", "plan", "first plan"])
def test_a_worker_is_asked_about_it(lost: str) -> None:
    rank = Rank(save_timeout_seconds=0.01, quarantine_after_seconds=0.04, only=lost == "first plan")
    if lost != "first plan":
        # Else a worker answers for nothing before the first job that it has taken.
        rank.save(list(range(100, 100 + BLOCK)), [5], request=7)
        rank.scheduler.finished(7)
        rank.scheduler.take_acquired()
        rank.scheduler.take_released()
    plan = save(rank)
    if lost == "report":
        assert rank.worker.submit(plan, kvprism.ReadyToken.host())
        assert rank.worker.wait(BOUND_SECONDS) is not None
    end = time.monotonic() + BOUND_SECONDS
    released: list[int] = []
    while rank.scheduler.counters()["ledger"]["alive"]:
        assert time.monotonic() < end
        question = rank.scheduler.end_step()
        if question:
            assert len(question) == 0
            assert rank.worker.submit(question.encode(), kvprism.ReadyToken.host())
        report = rank.worker.poll()
        if report is not None:
            rank.scheduler.report(report)
        released += list(rank.scheduler.take_released())
    assert sorted(released) == [1, 3]
    assert rank.worker.counters()["jobs_unknown"] >= 1
    assert rank.scheduler.counters()["ledger"]["asked"] >= 1
    assert rank.scheduler.tracked() == 0
    rank.close()


def test_a_rank_that_is_gone_holds_no_block() -> None:
    rank = Rank()
    save(rank)
    assert list(rank.scheduler.take_released()) == []
    rank.scheduler.rank_gone(0)
    assert sorted(rank.scheduler.take_released()) == [1, 3]
    assert rank.scheduler.counters()["ledger"]["blocks_held"] == 0
    assert rank.scheduler.tracked() == 0
    with pytest.raises(kvprism.Error, match="rank = -1"):
        rank.scheduler.rank_gone(-1)
    rank.close()
