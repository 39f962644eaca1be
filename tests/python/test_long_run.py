"""Nothing is kept of requests that have ended, however they ended (R66)."""

from __future__ import annotations

import random
from pathlib import Path

import kvprism
from store_helpers import BLOCK, Rank, hashes

PROMPTS = 200  # far more than the pool holds
CAPACITY = 40_000
WARM_UP, REQUESTS = 8_000, 20_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_does_not_grow_with_the_requests_that_were_served() -> None:
    pool = kvprism.MemoryPool(capacity_bytes=CAPACITY)
    store = kvprism.inject_faults(
        kvprism.memory_store(pool), fail_items=0.02, no_space=0.02, vanished=0.02, land_late=0.01
    )
    rank = Rank(
        store=store,
        backoff_after=1_000_000,
        saved_fresh_for_seconds=0.001,
        # A job's alarms are kept for as long, also when it has ended.
        load_timeout_seconds=0.5,
        save_timeout_seconds=0.5,
        quarantine_after_seconds=0.5,
    )
    draw = random.Random(5)
    prompts = [list(range(1000 * n, 1000 * n + 3 * BLOCK + 1)) for n in range(PROMPTS)]
    digests = [hashes(tokens) for tokens in prompts]

    def serve(request: int) -> None:
        which = draw.randrange(PROMPTS)
        aborted = draw.random() < 0.05
        blocks = draw.sample(range(1, 16), 3)
        offered = rank.scheduler.lookup(request, len(prompts[which]), digests[which])
        while offered is None:
            rank.scheduler.end_step()
            offered = rank.scheduler.lookup(request, len(prompts[which]), digests[which])
        if offered:
            rank.scheduler.allocated(request, offered, [blocks])
        else:
            rank.scheduler.advanced(request, 3 * BLOCK, digests[which])
            wanted = rank.scheduler.wants_save(request)
            if wanted is not None:
                rank.scheduler.save(request, wanted, [blocks])
        plan = rank.scheduler.end_step()
        if plan:
            rank.worker.submit(plan, kvprism.ReadyToken.host())
        if aborted:
            rank.scheduler.finished(request, aborted=True)
        if plan:
            rank.settle()
        rank.scheduler.take_load_ends()
        rank.scheduler.take_acquired()
        rank.scheduler.take_released()
        rank.scheduler.finished(request)

    for request in range(WARM_UP):
        serve(request)
    before = resident_bytes()
    for request in range(WARM_UP, REQUESTS):
        serve(request)
    grown = resident_bytes() - before

    counters = rank.scheduler.counters()
    assert counters["loads"] > 1000
    assert counters["loads_failed"] > 100
    assert counters["saves"] > 1000
    assert counters["save_chunks_failed"] > 100
    assert rank.scheduler.tracked() == 0
    ledger = counters["ledger"]
    assert ledger["alive"] == ledger["blocks_held"] == 0
    assert ledger["started"] == ledger["quiets"] > 5000
    assert rank.worker.counters()["jobs_alive"] == 0
    # The smallest record that is kept of each request would be 16 bytes.
    assert grown < (REQUESTS - WARM_UP) * 8
    rank.close()
