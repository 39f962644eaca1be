"""``kvprism replay``, against hit counts that were worked out without kvprism."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import configs
import kvprism
import numpy as np
import pytest
from kvprism.cli import main
from kvprism.trace import read_trace

BLOCK = 512


def write_trace(path: Path, requests: list[tuple[int, list[int]]]) -> Path:
    lines = [
        json.dumps({"timestamp": at, "input_length": length, "hash_ids": ids, "output_length": 7})
        for at, (length, ids) in enumerate(requests)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def synthetic(count: int, seed: int) -> list[tuple[int, list[int]]]:
    """Conversations that grow, fork and begin anew, with prompts of any length."""
    rng = random.Random(seed)
    fresh = iter(range(1_000_000))
    roots = [[next(fresh) for _ in range(rng.randint(0, 3))] for _ in range(3)]
    threads = [list(rng.choice(roots))]
    requests = []
    for _ in range(count):
        if rng.random() < 0.2:
            threads.append(list(rng.choice(roots)))
        at = rng.randrange(len(threads))
        thread = threads[at]
        if rng.random() < 0.1:
            del thread[rng.randint(0, len(thread)) :]
        thread += [next(fresh) for _ in range(rng.randint(0, 4))]
        ids = list(thread)
        rest = rng.choice([0, 0, 1, 2, 511, rng.randint(1, 511)])
        if rest or not ids:
            ids.append(next(fresh))
            length = (len(ids) - 1) * BLOCK + (rest or rng.randint(1, 512))
        else:
            length = len(ids) * BLOCK
        requests.append((length, ids))
    return requests


def expected(requests: list[tuple[int, list[int]]]) -> dict[str, int]:
    """What an endless cache of whole 512-token blocks gives, one token always left to compute."""
    stored: set[tuple[int, ...]] = set()
    totals = {"prompt_tokens": 0, "hit_tokens": 0, "objects_put": 0, "objects_got": 0}
    for length, ids in requests:
        blocks = 0
        while blocks < (length - 1) // BLOCK and tuple(ids[: blocks + 1]) in stored:
            blocks += 1
        totals["prompt_tokens"] += length
        totals["hit_tokens"] += blocks * BLOCK
        totals["objects_got"] += blocks
        for end in range(1, length // BLOCK + 1):
            prefix = tuple(ids[:end])
            totals["objects_put"] += prefix not in stored
            stored.add(prefix)
    return totals


def replay(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["replay", *arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def assert_totals(result: dict[str, Any], requests: list[tuple[int, list[int]]]) -> None:
    want = expected(requests)
    assert {key: result[key] for key in want} == want
    assert result["requests"] == len(requests)
    assert result["bytes_mismatched"] == 0
    assert result["bytes_verified"] == want["objects_got"] * 16384
    assert result["computed_tokens"] == want["prompt_tokens"] - want["hit_tokens"]
    assert result["rejected"] == 0


def test_hits_counted_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(
        tmp_path / "trace.jsonl",
        [
            (1100, [1, 2, 3]),  # nothing is there; stores 1 and 1-2
            (1100, [1, 2, 3]),  # both
            (1024, [1, 2]),  # one: the last token stays to be computed
            (1025, [1, 2, 9]),  # both
            (2048, [1, 5, 3, 4]),  # one; stores 1-5, 1-5-3 and 1-5-3-4
            (600, [2, 3]),  # none: 2 is no prefix; stores 2
            (1, [7]),  # nothing to store
        ],
    )
    result = replay(capsys, str(trace))
    assert result["hit_tokens"] == 512 * (0 + 2 + 1 + 2 + 1 + 0 + 0)
    assert result["objects_put"] == 2 + 3 + 1
    assert result["objects_got"] == 6
    assert result["prompt_tokens"] == 1100 + 1100 + 1024 + 1025 + 2048 + 600 + 1
    assert result["bytes_verified"] == 6 * 16384


@pytest.mark.parametrize("seed", range(3))
def test_hits_of_synthetic_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    requests = synthetic(150, seed)
    trace = write_trace(tmp_path / "trace.jsonl", requests)
    assert expected(requests)["hit_tokens"] > 0
    assert_totals(replay(capsys, "--json", str(trace)), requests)
    assert_totals(replay(capsys, str(trace), "--limit", "40"), requests[:40])


def test_hits_of_a_given_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """KVPRISM_TRACE names a real trace; without it a longer synthetic one takes its place."""
    given = os.environ.get("KVPRISM_TRACE")
    path = Path(given) if given else write_trace(tmp_path / "trace.jsonl", synthetic(400, 77))
    lines = [json.loads(line) for line in path.read_text().splitlines()[:200]]
    requests = [(line["input_length"], line["hash_ids"]) for line in lines]
    assert_totals(replay(capsys, str(path), "--limit", "200"), requests)


@pytest.mark.mooncake
def test_the_same_hits_on_mooncake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = synthetic(60, 5)
    trace = write_trace(tmp_path / "trace.jsonl", requests)
    result = replay(capsys, str(trace), "--store", "mooncake")
    want = expected(requests)
    assert result["hit_tokens"] == want["hit_tokens"] > 0
    assert result["objects_got"] == want["objects_got"]
    assert result["bytes_verified"] == want["objects_got"] * 16384
    assert result["bytes_mismatched"] == 0
    assert result["store"].startswith("mooncake")


def test_a_hybrid_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = (
        configs.attention(block_size=256),
        configs.ring(),
        configs.mamba(block_size=256),
    )
    config = tmp_path / "config.json"
    config.write_text(json.dumps(configs.config(*groups, num_blocks=64)))
    trace = write_trace(tmp_path / "trace.jsonl", [(1100, [1, 2, 3]), (1500, [1, 2, 4])])
    result = replay(capsys, str(trace), "--config", str(config))
    # The second request can use a state only where the first ended a step: after 1,024 tokens.
    assert result["hit_tokens"] == 1024
    assert result["bytes_verified"] > 0
    assert result["bytes_mismatched"] == 0


def test_a_pool_that_is_too_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(configs.config(configs.attention(block_size=256), num_blocks=4)))
    trace = write_trace(tmp_path / "trace.jsonl", [(100, [1]), (5000, list(range(10)))])
    assert main(["replay", str(trace), "--config", str(config)]) == 1
    streams = capsys.readouterr()
    assert json.loads(streams.out.splitlines()[-1])["rejected"] == 1
    assert "1 requests need more than 4 blocks (num_blocks)" in streams.err


def test_a_request_beyond_the_longest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hashes = list(range(2048))
    trace = write_trace(tmp_path / "trace.jsonl", [(100, [9]), (1 << 20, hashes)])
    assert main(["replay", str(trace)]) == 1
    streams = capsys.readouterr()
    assert json.loads(streams.out.splitlines()[-1])["too_long"] == 1
    assert streams.err == (
        "kvprism replay: 1 requests have more than 1,048,575 tokens, the most that the simulated"
        " engine takes\n"
    )


def test_tokens_follow_hash_id_and_position(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "trace.jsonl", [(1030, [5, 6, 7]), (1536, [5, 9, 7]), (512, [2**54 - 1])]
    )
    first, second, third = (request.tokens() for request in read_trace(trace))
    assert [len(tokens) for tokens in (first, second, third)] == [1030, 1536, 512]
    assert first.dtype == np.uint32
    assert (first[:512] == second[:512]).all()
    assert (first[512:1024] != second[512:1024]).any()
    assert (first[1024:] == second[1024:1030]).all()
    assert len(np.unique(third)) > 500


GOOD = {"timestamp": 0, "input_length": 600, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "{: expected a JSON object (Expecting property name"),
        ("[1]", "[1]: expected a JSON object"),
        ("null", "null: expected a JSON object"),
        ('{"timestamp": 0, "input_length": 5}', "hash_ids = nothing: expected this key"),
        ({**GOOD, "input_length": -3}, "input_length = -3: expected a number of tokens, 1 or more"),
        ({**GOOD, "input_length": True}, "input_length = true: expected a number of tokens"),
        ({**GOOD, "input_length": "600"}, "input_length = 600: expected a number of tokens"),
        ({**GOOD, "input_length": 6.5}, "input_length = 6.5: expected a number of tokens"),
        ({**GOOD, "input_length": 10**12}, "input_length = 1000000000000: expected a number"),
        ({**GOOD, "timestamp": None}, "timestamp = null: expected a number of milliseconds"),
        ({**GOOD, "timestamp": -1}, "timestamp = -1: expected a number of milliseconds"),
        (json.dumps({**GOOD, "timestamp": 1e400}), "timestamp = Infinity: expected a number"),
        (json.dumps({**GOOD, "timestamp": float("nan")}), "timestamp = NaN: expected a number"),
        (json.dumps(GOOD)[:-1] + ', "timestamp": 1}', "timestamp = given twice: expected one"),
        (
            json.dumps(GOOD)[:-1] + f', "extra": {"9" * 5000}}}',
            "expected numbers of a sensible length",
        ),
        ({**GOOD, "hash_ids": 7}, "hash_ids = 7: expected a list of hash ids"),
        ({**GOOD, "hash_ids": [1, -2]}, "hash_ids[1] = -2: expected an integer from 0 to 2**54"),
        ({**GOOD, "hash_ids": [1, "2"]}, "hash_ids[1] = 2: expected an integer"),
        ({**GOOD, "hash_ids": [2**60, 2]}, f"hash_ids[0] = {2**60}: expected an integer"),
        (
            {**GOOD, "hash_ids": [1]},
            "hash_ids = 1 ids: expected 2, one for each 512 of input_length = 600 tokens",
        ),
    ],
)
def test_a_malformed_line_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: Any, message: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    trace.write_text(json.dumps(GOOD) + "\n\n" + text + "\n")
    assert main(["replay", str(trace)]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""  # nothing was replayed before the mistake was seen
    assert f"{trace}:3" in streams.err
    assert message in streams.err
    # A limit before the line leaves it unread.
    assert main(["replay", str(trace), "--limit", "1", "--json"]) == 0


def test_all_problems_come_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines: list[Any] = [GOOD, {"timestamp": -1, "input_length": 0}, [1], {**GOOD, "hash_ids": [1]}]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = tmp_path / "config.json"
    config.write_text('{"num_blocks": 0}')
    assert main(["replay", str(trace), "--config", str(config)]) == 2
    assert capsys.readouterr().err == (
        "kvprism replay: 6 problems\n"
        f"  {trace}:2: hash_ids = nothing: expected this key to be present\n"
        f"  {trace}:2: timestamp = -1: expected a number of milliseconds, 0 or more\n"
        f"  {trace}:2: input_length = 0: expected a number of tokens, 1 or more\n"
        f"  {trace}:3 = [1]: expected a JSON object\n"
        f"  {trace}:4: hash_ids = 1 ids: expected 2, one for each 512 of input_length = 600"
        " tokens\n"
        f"  cache config {config}: 2 problems\n"
        "    num_blocks = 0: expected a positive integer\n"
        "    groups: expected a list of groups (missing)\n"
    )
    trace.write_text("[]\n" * 1000)
    assert main(["replay", str(trace)]) == 2
    assert capsys.readouterr().err.count("expected a JSON object") == 20
    with pytest.raises(kvprism.ConfigError, match=r"trace.jsonl:1 = \[\]: expected a JSON object"):
        next(read_trace(trace))


def test_files_that_are_no_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (tmp_path / "none.jsonl", "expected a trace, found no such file"),
        (tmp_path, "expected a trace, found a directory"),
        (binary, "expected UTF-8 text"),
        (empty, "expected at least one request, found none"),
    ):
        assert main(["replay", str(path)]) == 2
        assert f"{path}: {message}" in capsys.readouterr().err
    with pytest.raises(kvprism.NotFoundError):
        next(read_trace(tmp_path / "none.jsonl"))
    for limit in ("0", "-1", "x"):
        with pytest.raises(SystemExit):
            main(["replay", str(empty), "--limit", limit])
        assert f"{limit}: expected 1 or more" in capsys.readouterr().err


def test_a_line_without_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "/dev/zero"]) == 2
    assert "/dev/zero:1: expected lines of at most 64 MiB" in capsys.readouterr().err


def test_a_pool_that_does_not_fit_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("kvprism.sim.SimMemory", no_memory)
    trace = write_trace(tmp_path / "trace.jsonl", [(512, [1])])
    assert main(["replay", str(trace)]) == 2
    assert "num_blocks = 3: expected a pool that fits in memory" in capsys.readouterr().err


def test_the_reader_holds_one_line_at_a_time(tmp_path: Path) -> None:
    """A pipe can be read, and the reader takes no more than it is asked for."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\n"
            "with open(sys.argv[1], 'w') as out:\n"
            "    for _ in range(3):\n"
            f"        out.write({json.dumps(json.dumps(GOOD))} + chr(10)); out.flush()\n"
            "    sys.stdin.read()\n",
            str(pipe),
        ],
        stdin=subprocess.PIPE,
    )
    try:
        reader = read_trace(pipe, limit=3)
        # The end of the file has not come yet.
        assert [next(reader).line for _ in range(3)] == [1, 2, 3]
    finally:
        writer.communicate()


@pytest.mark.parametrize("size", ["tp", "pp"])
def test_a_configuration_of_several_ranks_is_refused(
    size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only one is simulated: jobs would wait for the others' reports for ever."""
    group = {"kind": "full_attention", "layers": ["f0"], "block_size": 512, "num_kv_heads": 2}
    group |= {"head_size": 8, "dtype": "float16"}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_blocks": 99, "parallel": {size: 2}, "groups": [group]}))
    trace = write_trace(tmp_path / "trace.jsonl", synthetic(2, 5))
    assert main(["replay", str(trace), "--config", str(config)]) == 2
    assert capsys.readouterr().err == (
        "kvprism replay: parallel = 2 ranks: expected one, tp = pp = pcp = 1: the replay simulates"
        " one\n"
    )
