"""Mode `embedded`: the memory that a worker lends outlives the client that moves its bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kvprism.local_mooncake import LocalMooncake, open_local
from test_halves import BLOCK, TOKENS, Engine, _hash, configuration, idle, memory_of, run
from test_places import one_stage, pool_bytes, roles

pytestmark = pytest.mark.xdist_group("places")

LENT = 32 << 20


@pytest.fixture
def mooncake() -> Iterator[LocalMooncake]:
    # The master is not to notice by itself who has gone.
    flags = {"client_ttl": 120}
    with LocalMooncake(storage_bytes=64 << 20, master_flags=flags) as running:
        yield running


def ask(mooncake: LocalMooncake, what: str) -> str:
    with open_local(f"http://{mooncake.metrics}/{what}") as answer:
        return answer.read().decode()


def endpoints(mooncake: LocalMooncake) -> set[str]:
    """Of all segments of the pool."""
    told = json.loads(ask(mooncake, "get_segments_detail"))
    return {segment["te_endpoint"] for segment in told["segments"]}


def prompt(number: int) -> list[int]:
    """One block, and a token that needs to be computed."""
    return [number, *TOKENS[1 : BLOCK + 1]]


def store(mooncake: LocalMooncake, engine: Engine, worker: Any, tokens: list[int]) -> str:
    """Saves a prompt, and returns the endpoint of the segment that its object lies in."""
    before = set(ask(mooncake, "get_all_keys").splitlines())
    request = engine.request("save", tokens)
    engine.allocate(request, len(tokens))
    run(worker, engine, engine.step(save=len(tokens)))
    engine.free(request)
    (key,) = set(ask(mooncake, "get_all_keys").splitlines()) - before
    told = json.loads(ask(mooncake, f"query_key?key={key}"))
    return str(told["data"][0]["transport_endpoint_"])


def loads(engine: Engine, worker: Any, tokens: list[int]) -> bool:
    """Whether a prompt that the store has promised arrives."""
    request = engine.request("load", tokens)
    end = time.monotonic() + 60
    while (found := engine.half.lookup(request, 0)[0]) is None:
        assert time.monotonic() < end
        idle(worker, engine.step())
    assert found == BLOCK
    engine.allocate(request, BLOCK, external=BLOCK)
    results = run(worker, engine, engine.step())
    assert results.finished == {"load"}
    engine.free(request)
    return not (results.failed or results.failed_blocks)


def test_what_a_worker_lends_outlives_a_client_that_is_replaced(mooncake: LocalMooncake) -> None:
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(_hash)
    vllm_config, config = one_stage(), configuration()
    (standalone,) = endpoints(mooncake)
    before = pool_bytes(mooncake)
    given = {"mode": "embedded", "global_segment_size": LENT}
    one = roles(vllm_config, mooncake.master, "KVPrismConnector", **given)[1](config, 0)
    for _ in range(2):  # registered anew: it lends once
        one.register_kv_caches(memory_of(config))
    assert pool_bytes(mooncake) == before + LENT
    worker = one._worker
    engine = Engine(mooncake, one._described)
    (own,) = endpoints(mooncake) - {standalone}
    lies: dict[str, list[int]] = {}
    number = 1000
    while not {own, standalone} <= lies.keys():
        number += 1
        assert number < 1040, f"all lie in {list(lies)}"
        lies[store(mooncake, engine, worker, prompt(number))] = prompt(number)
    mooncake.stop_storage()
    assert not loads(engine, worker, lies[standalone])
    end = time.monotonic() + 60
    while not (counters := worker._store.counters())["usable"] or counters["retired_now"]:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert counters["replacements"] == 1
    assert loads(engine, worker, lies[own])
    assert pool_bytes(mooncake) == before + LENT, "the master has not noticed the other one's end"
    engine.half.close()
    one.shutdown()
    assert pool_bytes(mooncake) == before
