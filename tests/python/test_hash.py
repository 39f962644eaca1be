"""Block hashes against cbor2 with hashlib and xxhash, on which vLLM's own are built."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import cbor2
import kvprism
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from kvprism.hash import BlockHasher, block_hasher, environment_seed

DIGESTS: dict[str, Callable[[bytes], bytes]] = {
    "sha256_cbor": lambda data: hashlib.sha256(data).digest(),
    "xxhash_cbor": xxhash.xxh3_128_digest,
}


def reference(
    algorithm: str, seed: str, tokens: list[int], unit: int, extras: list[Any]
) -> list[bytes]:
    def digest(value: Any) -> bytes:
        return DIGESTS[algorithm](cbor2.dumps(value, canonical=True))

    chain, out = digest(seed), []
    for at, extra in enumerate(extras):
        chain = digest((chain, tuple(tokens[at * unit : (at + 1) * unit]), extra))
        out.append(chain)
    return out


def extras_of(
    units: int,
    unit: int,
    lora: tuple[str, str] | None,
    items: list[tuple[str, int, int]],
    salt: str,
    embeds: np.ndarray[Any, Any] | None,
) -> list[Any]:
    """By the words of the specification, unit by unit."""
    out: list[Any] = []
    for at in range(units):
        begin, end = at * unit, (at + 1) * unit
        extra: list[Any] = [("lora", *lora)] if lora else []
        for identifier, offset, length in items:
            if offset < end and offset + length > begin:
                extra.append(("mm", identifier, offset - begin))
        if at == 0 and salt:
            extra.append(("cache_salt", salt))
        if embeds is not None:
            rows = hashlib.sha256(embeds[begin:end].tobytes()).digest()
            extra.append(("prompt_embeds", rows))
        out.append(tuple(extra) or None)
    return out


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    unit = draw(st.integers(1, 40))
    ids = st.one_of(st.integers(0, 30), st.integers(0, 2**32 - 1))
    tokens = draw(st.lists(ids, max_size=6 * unit))
    items, offset = [], 0
    for _ in range(draw(st.integers(0, 4))):
        offset += draw(st.integers(0, 2 * unit))
        length = draw(st.integers(1, 3 * unit))
        items.append((draw(st.text(max_size=40)), offset, length))
        offset += length
    embeds = None
    if draw(st.booleans()):
        rows = draw(st.integers(1, 6 * unit))
        embeds = np.random.default_rng(rows).random((rows, 3), dtype=np.float32)
    return {
        "algorithm": draw(st.sampled_from(sorted(DIGESTS))),
        "seed": draw(st.text(max_size=70)),
        "unit": unit,
        "tokens": tokens,
        "lora": draw(st.none() | st.tuples(st.text(), st.text(max_size=300))),
        "items": items,
        "cache_salt": draw(st.just("") | st.text(max_size=30)),
        "prompt_embeds": embeds,
    }


@settings(deadline=None)
@given(requests())
def test_hashes_are_those_of_cbor2_and_a_digest(request: dict[str, Any]) -> None:
    unit, tokens = request["unit"], request["tokens"]
    rest = {key: request[key] for key in ("lora", "items", "cache_salt", "prompt_embeds")}
    hasher = BlockHasher(request["algorithm"], hash_block_size=unit, seed=request["seed"])
    ours = hasher.hashes(tokens, **rest)
    extras = extras_of(len(tokens) // unit, unit, *rest.values())
    theirs = reference(request["algorithm"], request["seed"], tokens, unit, extras)
    assert [row.tobytes() for row in ours] == theirs
    assert ours.shape == (len(theirs), hasher.width)
    # A chain that is continued is the same chain.
    if theirs:
        half = len(theirs) // 2
        more = hasher.hashes(
            np.array(tokens[half * unit :], dtype=np.uint32),
            first=half * unit,
            parent=ours[half - 1] if half else b"",
            **rest,
        )
        assert [row.tobytes() for row in more] == theirs[half:]


def test_seed_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert environment_seed() is None
    default = block_hasher("sha256_cbor", 16)
    assert default.none_hash == hashlib.sha256(cbor2.dumps("vllm-none-hash")).digest()
    with pytest.raises(kvprism.ConfigError, match="seed = none: expected a seed, as xxhash_cbor"):
        block_hasher("xxhash_cbor", 16)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    seeded = block_hasher("xxhash_cbor", 16)
    assert seeded.none_hash == xxhash.xxh3_128_digest(cbor2.dumps("0"))
    assert (seeded.algorithm, seeded.width, seeded.hash_block_size) == ("xxhash_cbor", 16, 16)


def test_a_hash_that_pickles_is_named() -> None:
    with pytest.raises(kvprism.ConfigError) as error:
        BlockHasher("sha256", hash_block_size=16)
    assert str(error.value) == (
        'block hasher: algorithm = sha256: expected "sha256_cbor" or "xxhash_cbor"'
    )


@pytest.mark.parametrize("size", [-1, 2**32])
def test_a_size_out_of_range_is_named(size: int) -> None:
    expected = f"hash_block_size = {size}: expected a whole number from 0 to 4294967295"
    with pytest.raises(kvprism.ConfigError, match=expected):
        BlockHasher(hash_block_size=size)


def test_embeddings_are_rows() -> None:
    hasher = BlockHasher(hash_block_size=2)
    with pytest.raises(kvprism.ArgumentError, match="expected a contiguous array"):
        hasher.hashes([0, 0], prompt_embeds=np.zeros(8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first": 2**32}, "first = 4294967296: expected a whole number from 0 to 4294967295"),
        ({"first": 1}, "first = 1: expected a multiple of 2"),
        ({"first": 2, "parent": b"short"}, "parent = 5 bytes: expected 32 bytes, the hash of"),
        ({"first": 2, "parent": np.zeros((32, 2), np.uint8)[:, 0]}, "expected bytes or a contig"),
        ({"items": [("a", 0, 1), ("b", -1, 2)]}, r"items\[1\].offset = -1: expected a whole"),
        ({"tokens": [0, -1]}, r"tokens\[1\] = -1: expected a token id from 0 to 4294967295"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(kvprism.ArgumentError, match=message):
        BlockHasher(hash_block_size=2).hashes(**({"tokens": [0, 0]} | change))


def test_two_threads_do_not_share_a_hasher() -> None:
    hasher = BlockHasher(hash_block_size=16)
    many, few = np.arange(4_000_000, dtype=np.int32), np.arange(32, dtype=np.int32)
    expected = [BlockHasher(hash_block_size=16).hashes(tokens).tobytes() for tokens in (many, few)]
    refused: set[str] = set()

    def hashes(tokens: np.ndarray[Any, Any]) -> bytes | None:
        try:
            return hasher.hashes(tokens).tobytes()
        except kvprism.ArgumentError as error:
            refused.add(str(error))
            return None

    for _ in range(20):
        long: list[bytes | None] = []
        thread = threading.Thread(target=lambda answers=long: answers.append(hashes(many)))
        thread.start()
        while thread.is_alive():
            assert hashes(few) in (expected[1], None)
        assert long[0] in (expected[0], None)
        if refused:
            break
    assert refused == {"block hasher: thread = a second one: expected one call at a time"}


def test_a_scheduler_takes_them() -> None:
    from store_helpers import BLOCK, Rank

    rank = Rank()
    hasher = BlockHasher(hash_block_size=BLOCK)
    rank.scheduler.advanced(1, 2 * BLOCK, hasher.hashes(list(range(2 * BLOCK))))
    assert rank.scheduler.wants_save(1) == (0, 2 * BLOCK)
    rank.scheduler.finished(1)
    rank.close()
