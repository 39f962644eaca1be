"""What a listener to vLLM's KV cache events hears of the store."""

from __future__ import annotations

from typing import Any

import conftest
import harness
from harness import LiveEngine
from kvprism.local_mooncake import LocalMooncake, free_port
from test_four_ways import keys_of

Block = tuple[int, Any]  # group and hash
UNKNOWN = "unknown"


def batches(socket: Any) -> list[Any]:
    """Events that have come so far; the engine has said that it is done."""
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    events: list[Any] = []
    while socket.poll(2000):
        *_, content = socket.recv_multipart()
        events += msgspec.msgpack.decode(content, type=KVEventBatch).events
    return events


def chunks(events: list[Any], medium: str) -> dict[Block, tuple[Any, list[int]]]:
    """Parent and tokens of every block that was announced as stored.

    Where vLLM leaves null blocks out of an event, its tokens and parent are not those of the hashes
    that are left; nothing is known of such blocks but their hash.
    """
    from vllm.distributed.kv_events import BlockStored

    found: dict[Block, tuple[Any, list[int]]] = {}
    for event in events:
        if not isinstance(event, BlockStored) or event.medium != medium:
            continue
        parent = event.parent_block_hash
        if len(event.token_ids) != len(event.block_hashes) * event.block_size:
            assert medium == "GPU"
            found |= {(event.group_idx, name): (UNKNOWN, []) for name in event.block_hashes}
            continue
        for at, name in enumerate(event.block_hashes):
            begin = at * event.block_size
            tokens = event.token_ids[begin : begin + event.block_size]
            found[event.group_idx, name] = (parent, tokens)
            parent = name
    return found


def block_of(key: str, groups: list[int]) -> Block:
    """Which the key names; events have the last 64 bits of a hash."""
    *_, place, block_hash = key.split("/")
    return groups[int(place)], int(block_hash, 16) & ((1 << 64) - 1)


def test_what_is_stored_is_announced_as_the_engine_announces_its_own() -> None:
    import zmq

    port = free_port()
    listening = {
        "kv_events_config": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{port}",
        }
    }
    engine = {"dtype": "bfloat16", "mamba_cache_mode": "align"} | listening
    with (
        LocalMooncake(storage_bytes=1 << 30) as mooncake,
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket,
    ):
        socket.subscribe(b"")
        socket.bind(f"tcp://127.0.0.1:{port}")
        with LiveEngine(
            conftest.model("ring_qwen3next"),
            engine=engine,
            connector=harness.kvprism_connector(mooncake.master),
        ) as running:
            # The first events may be published before the subscription has arrived.
            running.serve(harness.prompts(seed=8), settle=True)
            batches(socket)
            before = keys_of(mooncake)
            running.serve(harness.prompts(), settle=True)
            running.serve(harness.prompts(seed=9), max_tokens=1, settle=True)
            events = batches(socket)
            fresh = keys_of(mooncake) - before
    local, stored = chunks(events, "GPU"), chunks(events, "STORAGE")
    assert len(fresh) > 0
    groups = {group for group, _ in stored}
    assert groups == {group for group, _ in local}
    assert len(groups) == 4, "attention and states; the ring is in no store"
    # With one rank an object is a block.
    assert sorted(stored) == sorted(block_of(key, sorted(groups)) for key in fresh)
    assert set(stored) <= set(local)
    compared = {block for block in stored if local[block][0] != UNKNOWN}
    assert len(compared) > 8
    assert {block: stored[block] for block in compared} == {b: local[b] for b in compared}
    for event in events:
        if getattr(event, "medium", None) == "STORAGE":
            assert (event.locality, event.lora_name) == ("REMOTE", None)
            assert event.kv_cache_spec_kind in ("full_attention", "mamba")
