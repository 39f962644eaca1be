"""What happens when the processes of one engine are of different versions."""

from __future__ import annotations

import struct

import kvprism
from store_helpers import BLOCK, Rank, hashes

PROMPT = list(range(3 * BLOCK))
VERSION_AT, FLAGS_AT = 4, 6  # behind the magic of plans and reports


def changed(message: bytes, at: int, value: int) -> bytes:
    return message[:at] + struct.pack("<H", value) + message[at + 2 :]


def planned() -> tuple[Rank, bytes]:
    """A rank whose scheduler has planned the save of three blocks."""
    rank = Rank()
    rank.scheduler.advanced(1, len(PROMPT), hashes(PROMPT))
    rank.scheduler.save(1, (0, len(PROMPT)), [[3, 1, 7]])
    plan = rank.scheduler.end_step().encode()
    assert list(rank.scheduler.take_acquired()) == [3, 1, 7]
    return rank, plan


def test_jobs_of_a_plan_of_another_version_fail_and_return_their_blocks() -> None:
    rank, plan = planned()
    taken = rank.worker.submit(changed(plan, VERSION_AT, 2), kvprism.ReadyToken.host())
    assert not taken
    assert taken.refusal == "step plan: version = 2: expected 1"
    assert rank.worker.counters()["plans_refused"] == 1
    report = rank.worker.poll()
    assert report is not None
    rank.scheduler.report(report)
    assert list(rank.scheduler.take_released()) == [3, 1, 7]
    assert rank.scheduler.counters()["ledger"]["alive"] == 0
    rank.close()


def test_jobs_of_a_plan_with_an_unknown_flag_fail_and_return_their_blocks() -> None:
    rank, plan = planned()
    taken = rank.worker.submit(changed(plan, FLAGS_AT, 2), kvprism.ReadyToken.host())
    assert taken.refusal == "step plan: flags = 2: expected 0 or 1"
    report = rank.worker.poll()
    assert report is not None
    rank.scheduler.report(report)
    assert list(rank.scheduler.take_released()) == [3, 1, 7]
    assert rank.scheduler.counters()["ledger"]["alive"] == 0
    rank.close()


def test_a_report_of_another_version_is_counted_and_not_believed() -> None:
    rank, plan = planned()
    assert rank.worker.submit(plan, kvprism.ReadyToken.host())
    report = rank.worker.wait(60)
    assert report is not None
    rank.scheduler.report(changed(report, VERSION_AT, 2))
    counters = rank.scheduler.counters()
    assert counters["reports_malformed"] == 1
    assert counters["saved_objects"] == 0
    assert len(rank.scheduler.take_released()) == 0
    rank.scheduler.report(report)
    assert rank.scheduler.counters()["saved_objects"] == 3
    rank.close()
