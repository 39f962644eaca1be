"""``kvprism replay``: a trace of requests on a simulated engine whose cache is the store alone."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from . import sim
from ._core import (
    CacheConfig,
    ConfigError,
    Error,
    KeySchema,
    MemoryPool,
    ObjectStore,
    Projection,
    StoreScheduler,
    StoreWorker,
    TimedOutError,
    memory_store,
    mooncake_store,
)
from .trace import TOKENS_PER_HASH, read_trace, several

# Of a prompt and its output.
MAX_MODEL_TOKENS = 1 << 20
# Tokens of a step: long prompts are prefilled in chunks, as engines do.
TOKEN_BUDGET = 8192
# A request that has not ended by then never will.
REQUEST_SECONDS = 300.0


@dataclass(frozen=True)
class TraceShape:
    """What has to be known of a trace before it can be replayed.

    Attributes:
        requests: How many there are.
        longest: Tokens of the longest prompt.
        distinct_hashes: Different hash ids, a measure of what will be stored.
    """

    requests: int
    longest: int
    distinct_hashes: int


def shape_of(path: str, limit: int | None, problems: list[str]) -> TraceShape:
    """Reads the trace once; a malformed line ends the replay before it begins.

    Args:
        path: The trace.
        limit: Stop after so many requests.
        problems: Gets what is wrong with it.
    """
    requests = longest = 0
    hashes: set[int] = set()
    try:
        for request in read_trace(path, limit, problems):
            requests += 1
            longest = max(longest, request.input_length)
            hashes.update(request.hash_ids)
    except Error as error:
        problems.append(str(error))
    if requests == 0 and not problems:
        problems.append(f"{path}: expected at least one request, found none")
    return TraceShape(requests, longest, len(hashes))


def config_of(path: str, problems: list[str]) -> CacheConfig | None:
    """Reads a cache config that one rank can simulate.

    Args:
        path: The file.
        problems: Gets what is wrong with it.

    Returns:
        None when it is no cache config.
    """
    try:
        config = CacheConfig.from_file(path)
    except Error as error:
        problems.append(str(error))
        return None
    if config.parallel.world != 1:
        problems.append(
            f"parallel = {config.parallel.world} ranks: expected one, tp = pp = pcp = 1: the replay"
            " simulates one"
        )
    try:
        Projection(config)
    except Error as error:
        problems.append(str(error))
    return config


def default_config(longest: int) -> CacheConfig:
    """One full-attention group of 16 KiB a block, as many blocks as the longest request needs.

    Args:
        longest: Tokens of the longest prompt; one more is generated.
    """
    blocks = -(-(longest + 1) // TOKENS_PER_HASH)
    group = {
        "kind": "full_attention",
        "layers": ["layer0"],
        "block_size": TOKENS_PER_HASH,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": "float16",
    }
    return CacheConfig.from_dict({"num_blocks": blocks + 1, "groups": [group]})


def stored_bytes(projection: Projection, tokens: int) -> int:
    """Bytes that a cache of so many different tokens takes in a store."""
    total = 0
    for group_id in projection.store_group_ids:
        group = projection.group(group_id)
        total += -(-tokens // group.tokens_per_block) * group.object_bytes
    return total


@contextmanager
def open_store(kind: str, capacity_bytes: int) -> Iterator[ObjectStore]:
    """Connects to an empty store that can hold so many bytes, and closes it afterwards."""
    if kind == "memory":
        yield memory_store(MemoryPool())
        return
    from .local_mooncake import LocalMooncake

    # Mooncake logs what is not worth a line here; what goes wrong is told by kvprism.
    quiet = {"MC_LOG_LEVEL": os.environ.get("MC_LOG_LEVEL", "ERROR")}
    # Objects are rounded up, and the master evicts before it is full.
    with LocalMooncake(storage_bytes=capacity_bytes + capacity_bytes // 2 + (64 << 20)) as server:
        yield mooncake_store(master=server.master, environment=quiet)


def replay(path: str, config: CacheConfig, store: ObjectStore, limit: int | None) -> dict[str, Any]:
    """Replays a trace, one request after the other.

    Args:
        path: The trace.
        config: The engine's cache.
        store: An empty store that nobody uses.
        limit: Stop after so many requests.

    Returns:
        Totals by name.
    """
    projection = Projection(config)
    schema = KeySchema.kvprism(
        projection, model="trace", hash_algorithm="simulated", hash_is_stable=True
    )
    try:
        memory = sim.SimMemory(projection, guard_bytes=0)
    except MemoryError:
        block = max(group.object_bytes for group in projection.groups())
        raise ConfigError(
            f"num_blocks = {config.num_blocks}: expected a pool that fits in memory, this one"
            f" takes {config.num_blocks * block:,} bytes or more"
        ) from None
    engine = sim.Engine(
        # How busy this machine is must not tell.
        StoreScheduler(
            schema,
            store,
            lookup_timeout_seconds=REQUEST_SECONDS,
            load_timeout_seconds=REQUEST_SECONDS,
            save_timeout_seconds=REQUEST_SECONDS,
        ),
        StoreWorker(schema, memory.segment_map(), store),
        memory,
        local_cache=False,
        token_budget=TOKEN_BUDGET,
        max_model_tokens=MAX_MODEL_TOKENS,
    )
    begin = time.monotonic()
    hit_tokens = rejected = too_long = 0
    try:
        for request in read_trace(path, limit):
            too_long += request.input_length >= MAX_MODEL_TOKENS  # one more is generated
            engine.submit(request.line, request.tokens())
            if not engine.run_until_idle(REQUEST_SECONDS):
                where = f"{path}:{request.line}"
                raise TimedOutError(
                    f"{where}: not done in {REQUEST_SECONDS:.0f} s ({engine.describe()})"
                )
            for finished in engine.take_finished():
                hit_tokens += finished.external_hit_tokens
                rejected += finished.rejected
        seconds = time.monotonic() - begin
        stats = engine.stats()
    finally:
        engine.close()
    return {
        "store": store.name,
        "requests": stats["submitted"],
        "rejected": rejected,
        "too_long": too_long,
        "prompt_tokens": stats["prompt_tokens"],
        "hit_tokens": hit_tokens,
        "computed_tokens": stats["computed_tokens"],
        "objects_put": stats["saves"]["objects"] - stats["saves"]["duplicates"],
        "objects_got": stats["loads"]["objects"],
        "bytes_put": stats["saves"]["bytes"],
        "bytes_got": stats["loads"]["bytes"],
        "chunks_not_put": stats["saves"]["failed_chunks"],
        "chunks_not_got": stats["loads"]["failed_chunks"],
        "bytes_verified": stats["bytes_verified"],
        "bytes_mismatched": stats["bytes_mismatched"],
        "seconds": round(seconds, 3),
    }


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``kvprism replay``."""
    parser.add_argument("trace", metavar="TRACE.jsonl", help="a trace in Mooncake's format")
    parser.add_argument("--config", help="cache config (JSON); by default 16 KiB for 512 tokens")
    parser.add_argument("--store", choices=("memory", "mooncake"), default="memory")
    parser.add_argument("--limit", type=_count, metavar="N", help="replay the first N requests")
    parser.add_argument("--json", action="store_true", help="print nothing but the last line")


def run(args: argparse.Namespace) -> int:
    """Runs ``kvprism replay``; 0 when every request ran and every loaded byte was right."""
    problems: list[str] = []
    shape = shape_of(args.trace, args.limit, problems)
    config = config_of(args.config, problems) if args.config else default_config(shape.longest)
    if problems or config is None:
        raise ConfigError(several(problems))
    capacity = stored_bytes(Projection(config), shape.distinct_hashes * TOKENS_PER_HASH)
    with open_store(args.store, capacity) as store:
        totals = replay(args.trace, config, store, args.limit)
    good = totals["bytes_mismatched"] == 0 and totals["rejected"] == 0
    if not args.json:
        share = totals["hit_tokens"] / totals["prompt_tokens"]
        print(f"{totals['requests']:,} requests in {totals['seconds']:.1f} s on {totals['store']}")
        print(
            f"{totals['hit_tokens']:,} of {totals['prompt_tokens']:,} prompt tokens from the store"
            f" ({share:.1%})"
        )
        print(f"{totals['objects_put']:,} objects put, {totals['objects_got']:,} got")
        print(
            f"{totals['bytes_verified']:,} loaded bytes compared,"
            f" {totals['bytes_mismatched']:,} of them wrong"
        )
    if totals["too_long"]:
        print(
            f"kvprism replay: {totals['too_long']:,} requests have more than"
            f" {MAX_MODEL_TOKENS - 1:,} tokens, the most that the simulated engine takes",
            file=sys.stderr,
        )
    if totals["rejected"] > totals["too_long"]:
        print(
            f"kvprism replay: {totals['rejected'] - totals['too_long']:,} requests need more than"
            f" {config.num_blocks} blocks (num_blocks)",
            file=sys.stderr,
        )
    print(json.dumps(totals))
    return 0 if good else 1
