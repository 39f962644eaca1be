"""A long run against a real Mooncake whose pool is too small, with aborts and faults.

Every loaded byte is compared; at the end nothing may be remembered, and the process may not have
grown. Prints one line a minute and a JSON line at the end; exit status 0 only if all held.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from typing import Any

import kvprism
from kvprism import sim
from kvprism.local_mooncake import LocalMooncake
from records import record

BLOCK = 16
PREFIXES = 2000  # distinct beginnings, far more than the pool holds
IN_FLIGHT = 16
LOOKED_UP = 0.5  # of the requests, at least
GROWTH = 1.05  # resident bytes at the end against those after a fifth of the run
# Chances per operation: about 2 in 100 fail, 1 in 100 outlasts its bound. Of those that are late
# half come within it.
FAULTS = {
    "fail_call": 0.01,
    "fail_items": 0.01,
    "truncate": 0.002,
    "corrupt": 0.002,
    "lease_lost": 0.002,
    "vanished": 0.002,
    "no_space": 0.005,
    "land_late": 0.01,
    "late_quiet": 0.005,
    "delay": 0.02,
    "lookup_failed": 0.005,
    "lookup_late": 0.015,
}


FAILURES = (
    "fail_call",
    "fail_items",
    "truncate",
    "corrupt",
    "lease_lost",
    "vanished",
    "no_space",
    "lookup_failed",
)
# 5 % of the requests are aborted; of the operations 2 % fail and 1 % are late.
RATES = {"aborts": (0.035, 0.065), "failures": (0.01, 0.03), "time_outs": (0.005, 0.02)}


def config() -> kvprism.CacheConfig:
    """A hybrid cache: attention, a window, a state, and a ring that must not be stored."""
    shape = {"num_kv_heads": 2, "head_size": 32, "dtype": "float16"}
    attention = {"kind": "full_attention", "layers": ["f0"], "block_size": BLOCK, **shape}
    window = {
        "kind": "sliding_window",
        "layers": ["w0"],
        "block_size": BLOCK,
        "sliding_window": 2 * BLOCK,
        **shape,
    }
    ring = {"kind": "circular_buffer", "layers": ["r0"], "block_size": 8, **shape}
    state = {
        "kind": "mamba",
        "layers": ["m0"],
        "block_size": BLOCK,
        "mamba_cache_mode": "align",
        "shapes": [[64, 16]],
        "dtypes": ["float32"],
    }
    return kvprism.CacheConfig.from_dict(
        {"num_blocks": 1024, "groups": [attention, window, ring, state]}
    )


def resident_bytes() -> int:
    """Of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Traffic:
    """Prompts that share beginnings: a few popular ones, many rare ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def prompt(self) -> list[int]:
        prefix = int(PREFIXES * self._random.random() ** 3)
        beginning = random.Random(prefix)
        blocks = 2 + prefix % 7
        tokens = [beginning.randrange(50_000) for _ in range(blocks * BLOCK)]
        return tokens + [self._random.randrange(50_000) for _ in range(self._random.randint(1, 24))]

    def aborts(self) -> bool:
        return self._random.random() < 0.05

    def pick(self, ids: list[int]) -> int:
        return self._random.choice(ids)


def run(requests: int, pool_mib: int, seed: int, budget_seconds: float) -> dict[str, Any]:
    """One run; the totals by name."""
    projection = kvprism.Projection(config())
    schema = kvprism.KeySchema.kvprism(
        projection, model="soak", hash_algorithm="simulated", hash_is_stable=True
    )
    traffic = Traffic(seed)
    begin = time.monotonic()
    with LocalMooncake(storage_bytes=pool_mib << 20) as server:
        mooncake = kvprism.mooncake_store(
            master=server.master, environment={"MC_LOG_LEVEL": "ERROR"}
        )
        store = kvprism.inject_faults(
            mooncake,
            seed=seed,
            delay_seconds=2.0,
            late_seconds=0.2,
            lookup_late_seconds=0.5,
            **FAULTS,
        )
        scheduler = kvprism.StoreScheduler(
            schema,
            store,
            lookup_timeout_seconds=0.25,
            load_timeout_seconds=1.0,
            save_timeout_seconds=1.0,
            saved_fresh_for_seconds=1.0,
            avoid_failed_for_seconds=0.2,  # a call that hangs fails many loads: offers pause
            backoff_seconds=0.2,
        )
        memory = sim.SimMemory(projection)
        worker = kvprism.StoreWorker(schema, memory.segment_map(), store)
        engine = sim.Engine(scheduler, worker, memory, local_cache=False, token_budget=2048)
        settled = 0
        submitted = gone = 0
        alive: set[int] = set()
        said = begin
        while gone < requests:
            # Requests that come while the store is away show nothing of it, and are over at once.
            away = not mooncake.counters()["usable"]
            while submitted < requests and len(alive) < IN_FLIGHT and not away:
                submitted += 1
                engine.submit(submitted, traffic.prompt(), 1 + submitted % 4)
                alive.add(submitted)
                if traffic.aborts():
                    engine.abort(traffic.pick(sorted(alive)))
            engine.step()
            for finished in engine.take_finished():
                alive.discard(finished.id)
                gone += 1
            if settled == 0 and gone >= requests // 5:
                settled = resident_bytes()
            now = time.monotonic()
            if now - begin > budget_seconds:
                raise SystemExit(f"not done in {budget_seconds:.0f} s: {engine.describe()}")
            if now - said >= 60:
                said = now
                print(f"{gone:,} requests, {resident_bytes() >> 20} MiB, {engine.describe()}")
        idle = engine.run_until_idle(120)
        stats = engine.stats()
        totals = {
            "requests": submitted,
            "completed": stats["finished"],
            "aborted": stats["aborted"],
            "idle": idle,
            "bytes_verified": stats["bytes_verified"],
            "bytes_mismatched": stats["bytes_mismatched"],
            "loads_complete": stats["loads_complete"],
            "loads_partial": stats["loads_partial"],
            "external_hit_tokens": stats["external_hit_tokens"],
            "faults": store.faults(),
            "client": mooncake.counters(),
            "remembered": scheduler.tracked(),
            "scheduler": {
                name: value
                for name, value in scheduler.counters().items()
                if isinstance(value, int)
            },
            "ledger": scheduler.counters()["ledger"],
            "worker": worker.counters(),
            "resident_after_a_fifth": settled,
            "resident_at_the_end": resident_bytes(),
        }
        totals["rates"] = rates(totals)
        totals["unquiet_at_close"] = engine.close(30)
    totals["seconds"] = round(time.monotonic() - begin, 1)
    return totals


def rates(totals: dict[str, Any]) -> dict[str, float]:
    """Aborts of requests, failures and time-outs of operations."""
    faults, client = totals["faults"], totals["client"]
    calls = client["put_calls"] + client["get_calls"] + client["exists_calls"] + client["expired"]
    kept_back = faults["fail_call"] + faults["no_space"] + faults["lookup_failed"]
    # What is delayed beyond its deadline reaches the client as expired, lookups too.
    late = client["expired"] + client["late_calls"]
    return {
        "aborts": totals["aborted"] / totals["requests"],
        "failures": sum(faults[kind] for kind in FAILURES) / (calls + kept_back),
        "time_outs": late / (calls + kept_back),
    }


def problems(totals: dict[str, Any]) -> list[str]:
    """What did not hold."""
    found = []
    for name, (least, most) in RATES.items():
        if not least <= totals["rates"][name] <= most:
            found.append(f"{name} are {totals['rates'][name]:.4f}, not {least} to {most}")
    left = {
        "jobs_alive": totals["worker"]["jobs_alive"],
        "unquiet_calls": totals["worker"]["unquiet_calls"],
        "bytes_in_flight": totals["worker"]["bytes_in_flight"],
        "unquiet_now": totals["client"]["unquiet_now"],
        "retired_now": totals["client"]["retired_now"],
        "blocks_held": totals["ledger"]["blocks_held"],
        "blocks_in_quarantine": totals["ledger"]["blocks_in_quarantine"],
    }
    found += [f"{name} is {value} at the end" for name, value in left.items() if value]
    if totals["bytes_mismatched"]:
        found.append(f"{totals['bytes_mismatched']} loaded bytes were wrong")
    if not totals["bytes_verified"]:
        found.append("nothing was loaded")
    if not totals["idle"] or totals["remembered"] or totals["unquiet_at_close"]:
        found.append("something was still remembered at the end")
    if totals["completed"] + totals["aborted"] != totals["requests"]:
        found.append("a request was lost")
    if totals["scheduler"]["lookups"] < LOOKED_UP * totals["requests"]:
        found.append(f"only {totals['scheduler']['lookups']} requests were looked up")
    if totals["resident_at_the_end"] > GROWTH * totals["resident_after_a_fifth"]:
        found.append("the process grew")
    found += [f"no fault of kind {kind}" for kind in FAULTS if not totals["faults"][kind]]
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--pool-mib", type=int, default=64, help="of the storage process")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget-seconds", type=float, default=1800)
    args = parser.parse_args()
    totals = run(args.requests, args.pool_mib, args.seed, args.budget_seconds)
    broken = problems(totals)
    for line in broken:
        print(f"soak: {line}", file=sys.stderr)
    print(json.dumps(totals))
    growth = totals["resident_at_the_end"] / max(1, totals["resident_after_a_fifth"])
    record("soak-mooncake", seed=args.seed, growth=round(growth, 4), problems=broken, **totals)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
