"""Two processes name the same tokens alike (R37, R38), and other prefixes otherwise (R39)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import configs
import kvprism
import pytest
from kvprism.hash import BlockHasher

UNIT = 4
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import test_two_processes
print(test_two_processes.all_keys())
"""


def hashes(tokens: list[int]) -> list[bytes]:
    # The chain begins with a seed that vLLM reads from PYTHONHASHSEED; here it is given.
    rows = BlockHasher("sha256_cbor", hash_block_size=UNIT, seed="0").hashes(tokens=tokens)
    return [row.tobytes() for row in rows]


def schema(name: str) -> kvprism.KeySchema:
    config = configs.config(
        configs.attention(block_size=UNIT, total_num_kv_heads=4),
        configs.ring(),
        configs.mamba(block_size=2 * UNIT),
        parallel={"tp": 2, "pp": 2},
        key_schema=name,
        model_total_kv_heads=4,
        namespace="tenant",
    )
    projection = kvprism.Projection(kvprism.CacheConfig.from_dict(config))
    return kvprism.KeySchema.make(
        projection,
        model="org/model",
        model_revision="main",
        hash_algorithm="sha256_cbor",
        hash_is_stable=True,
        pipeline_split="0-2,2-4",
    )


def all_keys() -> str:
    """Every key of a prompt, of all groups and ranks, in both schemas."""
    names = [
        schema(name).keys(kvprism.StoreIndex(group), hashes(list(range(21))), shard)
        for name in ("kvprism", "vllm")
        for group in range(2)
        for shard in schema(name).shards(kvprism.StoreIndex(group))
    ]
    return json.dumps(names)


def test_keys_are_those_of_another_process() -> None:
    told = []
    for seed in ("1", "4242"):
        program = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(Path(__file__).parent)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        told.append(program.stdout.strip())
    ours = all_keys()
    assert len(json.loads(ours)) == 2 * 2 * 4
    assert told == [ours, ours]


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxhash_cbor"])
def test_equal_chunks_after_another_beginning_are_other_objects(algorithm: str) -> None:
    """[A, B, C, D, E] and [Z, B, C, D, E]: chunks B to E are alike, and what precedes them not."""
    hasher = BlockHasher(algorithm, hash_block_size=UNIT, seed="0")
    chunks = {name: [ord(name)] * UNIT for name in "ABCDEZ"}

    def keys(names: str) -> list[str]:
        tokens = [token for name in names for token in chunks[name]]
        rows = [row.tobytes() for row in hasher.hashes(tokens=tokens)]
        return schema("kvprism").keys(kvprism.StoreIndex(0), rows)

    one, other = keys("ABCDE"), keys("ZBCDE")
    assert len(one) == len(other) == 5
    assert set(one).isdisjoint(other)
    assert keys("ABCZE")[:3] == one[:3], "what is alike up to its end is one object"
    assert set(keys("ABCZE")[3:]).isdisjoint(one)
