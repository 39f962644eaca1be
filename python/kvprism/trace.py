"""Reads traces in Mooncake's format: one JSON object a line with timestamp, input_length, hash_ids.

Every hash id stands for 512 tokens and, with those before it, for the whole prefix that it ends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ._core import ConfigError, NotFoundError

TOKENS_PER_HASH = 512
# Hash id and position share one 64-bit number.
MAX_HASH_ID = 2**54
# A line is held in memory.
MAX_LINE_BYTES = 64 << 20
# Of malformed lines: whoever reads them has seen what is wrong.
MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace.

    Attributes:
        line: Its number in the file, from 1.
        input_length: Tokens of the prompt.
        hash_ids: One for each 512 tokens; the last may stand for fewer.
    """

    line: int
    input_length: int
    hash_ids: list[int]

    def tokens(self) -> npt.NDArray[np.uint32]:
        """The prompt: equal for equal hash ids at equal positions, different for others."""
        first = np.asarray(self.hash_ids, dtype=np.uint64) * np.uint64(TOKENS_PER_HASH)
        numbers = np.add.outer(first, np.arange(TOKENS_PER_HASH, dtype=np.uint64))
        return _scramble(numbers.reshape(-1)[: self.input_length])


def _scramble(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    numbers += np.uint64(0x9E3779B97F4A7C15)
    numbers ^= numbers >> np.uint64(30)
    numbers *= np.uint64(0xBF58476D1CE4E5B9)
    numbers ^= numbers >> np.uint64(27)
    numbers *= np.uint64(0x94D049BB133111EB)
    return (numbers >> np.uint64(32)).astype(np.uint32)


def read_trace(
    path: str | Path, limit: int | None = None, problems: list[str] | None = None
) -> Iterator[TraceRequest]:
    """Yields the requests of a trace, one line in memory at a time.

    Args:
        path: The file.
        limit: Stop after so many requests.
        problems: Gets what is wrong with malformed lines, each naming file, line, key and value.
            They are then left out, and reading ends after `MAX_PROBLEMS`.

    Raises:
        NotFoundError: There is no such file.
        ConfigError: It cannot be read, or, without `problems`, a line is malformed.
    """
    try:
        with open(path, "rb") as file:
            count = 0
            number = 0
            while limit is None or count < limit:
                raw = file.readline(MAX_LINE_BYTES + 1)
                if not raw:
                    return
                number += 1
                if len(raw) > MAX_LINE_BYTES:
                    raise ConfigError(
                        f"{path}:{number}: expected lines of at most {MAX_LINE_BYTES >> 20} MiB"
                    )
                text = raw.decode("utf-8")
                if text.isspace():
                    continue
                count += 1
                parsed = _parse(number, text)
                if isinstance(parsed, TraceRequest):
                    yield parsed
                    continue
                told = [f"{path}:{number}{problem}" for problem in parsed]
                if problems is None:
                    raise ConfigError(several(told))
                problems += told
                if len(problems) >= MAX_PROBLEMS:
                    return
    except FileNotFoundError:
        raise NotFoundError(f"{path}: expected a trace, found no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: expected a trace, found a directory") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text, found {error.reason}") from None
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable file, found {error.strerror}") from None


def several(problems: list[str]) -> str:
    """One message of all of them."""
    if len(problems) == 1:
        return problems[0]
    lines = (problem.replace("\n", "\n  ") for problem in problems)
    return "\n  ".join([f"{len(problems)} problems", *lines])


def _parse(number: int, text: str) -> TraceRequest | list[str]:
    """The request of a line, or what is wrong with it, from the place in the line on."""
    problems: list[str] = []

    def wrong(key: str, value: Any, expected: str) -> None:
        shown = json.dumps(value) if not isinstance(value, str) else value
        if len(shown) > 60:
            shown = shown[:57] + "..."
        problems.append(f"{': ' if key else ''}{key} = {shown}: expected {expected}")

    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                wrong(key, "given twice", "one value")
            found[key] = value
        return found

    try:
        record = json.loads(text, object_pairs_hook=once)
        expected = "a JSON object"
    except json.JSONDecodeError as error:
        record, expected = None, f"a JSON object ({error.msg} at column {error.colno})"
    except RecursionError:
        record, expected = None, "a JSON object (nested too deeply)"
    except ValueError:
        # Python refuses to read numbers of thousands of digits.
        record, expected = None, "numbers of a sensible length"
    if not isinstance(record, dict):
        wrong("", text.strip(), expected)
        return problems

    def value_of(key: str) -> Any:
        if key not in record:
            wrong(key, "nothing", "this key to be present")
        return record.get(key)

    timestamp, length, hash_ids = map(value_of, ("timestamp", "input_length", "hash_ids"))
    is_time = whole(timestamp) or isinstance(timestamp, float)
    if "timestamp" in record and (not is_time or not 0 <= timestamp < math.inf):
        wrong("timestamp", timestamp, "a number of milliseconds, 0 or more")
    has_length = whole(length) and 1 <= length < 2**31
    if "input_length" in record and not has_length:
        wrong("input_length", length, "a number of tokens, 1 or more")
    if not isinstance(hash_ids, list):
        if "hash_ids" in record:
            wrong("hash_ids", hash_ids, "a list of hash ids")
        return problems
    for at, hash_id in enumerate(hash_ids):
        if not whole(hash_id) or not 0 <= hash_id < MAX_HASH_ID:
            wrong(f"hash_ids[{at}]", hash_id, "an integer from 0 to 2**54 - 1")
            break  # the others are as wrong, most often
    if has_length and len(hash_ids) != (needed := -(-length // TOKENS_PER_HASH)):
        wrong(
            "hash_ids",
            f"{len(hash_ids)} ids",
            f"{needed}, one for each {TOKENS_PER_HASH} of input_length = {length} tokens",
        )
    return problems or TraceRequest(number, length, hash_ids)
