"""Bytes that change in the pool: Mooncake's checksums notice, nothing else does (R42)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kvprism.local_mooncake import LocalMooncake
from mooncake_helpers import SOURCES, TARGETS, Engine, prompt
from store_helpers import BLOCK

pytestmark = pytest.mark.mooncake

NOT_ALLOWED = 77
DAMAGED = 1  # the second of three blocks


def flip_a_bit(pid: int, pattern: bytes) -> int:
    """In the memory of a process, wherever the pattern is; tells how often it was."""
    found = 0
    with (
        open(f"/proc/{pid}/maps") as maps,
        open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory,
    ):
        for line in maps:
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if match is None or "[v" in line:
                continue
            begin, end = (int(number, 16) for number in match.groups())
            try:
                memory.seek(begin)
                content = memory.read(end - begin)
            except OSError:  # memory of a device
                continue
            at = content.find(pattern)
            while at >= 0:
                memory.seek(begin + at)
                memory.write(bytes([content[at] ^ 1]))
                found += 1
                at = content.find(pattern, at + 1)
    return found


def main() -> int:
    with LocalMooncake(storage_bytes=16 << 20) as mooncake:
        engine = Engine(mooncake)
        assert engine.stored(prompt(1)) == 3
        assert engine.loads_right(prompt(1))
        assert mooncake.storage_pid is not None
        try:
            flipped = flip_a_bit(mooncake.storage_pid, engine.memory[0, SOURCES[DAMAGED]].tobytes())
        except PermissionError:
            return NOT_ALLOWED
        assert flipped > 0
        end = engine.loaded(prompt(1))
        assert end is not None
        same = (engine.memory[:, TARGETS] == engine.memory[:, SOURCES]).all(axis=(0, 2))
        result = {
            "complete": end.complete,
            "valid_tokens": end.valid_tokens,
            "failed": [block.block for block in end.failed],
            "same": same.tolist(),
        }
        # The object is removed, so that the next save replaces it.
        counters = engine.scheduler.counters
        while counters()["objects_removed"] + counters()["removals_failed"] < (not end.complete):
            engine.request()
            engine.scheduler.end_step()
        result["mismatches"] = counters()["mismatches"]
        result["removed"] = counters()["objects_removed"]
        if not end.complete:
            result["stored_again"] = engine.stored(prompt(1))
        result["right_again"] = engine.loads_right(prompt(1))
        assert engine.holds_nothing()
        engine.close()
    print(json.dumps(result))
    return 0


def run(**environment: str) -> dict[str, object]:
    """In a process of its own: Mooncake reads its variables when it is opened."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__))],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if done.returncode == NOT_ALLOWED:
        pytest.skip("the memory of a child process may not be written here")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_damaged_object_is_a_failed_block() -> None:
    result = run(MOONCAKE_STORE_CHECKSUM="1")
    assert result["complete"] is False
    assert result["failed"] == [TARGETS[DAMAGED]]
    assert result["valid_tokens"] == DAMAGED * BLOCK
    assert (result["mismatches"], result["removed"]) == (1, 1)
    assert result["stored_again"] == 2, "the first block is known to be there"
    assert result["right_again"] is True


def test_without_checksums_it_is_taken_for_what_it_was() -> None:
    result = run(MOONCAKE_STORE_CHECKSUM="0")
    assert result["complete"] is True
    assert result["same"] == [True, False, True]
    assert (result["mismatches"], result["removed"]) == (0, 0)
    assert result["right_again"] is False


if __name__ == "__main__":
    sys.exit(main())
