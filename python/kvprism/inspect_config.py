"""``kvprism inspect``: what a cache config means, and everything that is wrong with it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from . import CacheConfig, Error, Group, Problem, Projection, validate_store

COLUMNS = (
    "group",
    "kind",
    "block",
    "tokens",
    "page bytes",
    "object bytes",
    "transfer",
    "store",
    "objects/1k tokens",
    "why not stored",
)
LEFT = {1, 9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("config", metavar="CONFIG.json", help="a cache config in its JSON form")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _group_row(group: Group) -> dict[str, Any]:
    stored = group.store_index is not None
    return {
        "id": int(group.id),
        "kind": group.kind,
        "layers": list(group.layers),
        "block_size": group.block_size,
        "tokens_per_block": group.tokens_per_block,
        "page_size_bytes": group.page_size_bytes,
        "object_bytes": group.object_bytes,
        "transfer_index": None if group.transfer_index is None else int(group.transfer_index),
        "store_index": None if group.store_index is None else int(group.store_index),
        "why_not_stored": group.why_not_stored or None,
        "hit": group.hit,
        "save": group.save,
        "peer": group.peer,
        "replay_tokens": group.replay_tokens,
        # At most: a state group stores only the boundaries that the engine hands over.
        "objects_per_1000_tokens": round(1000 / group.tokens_per_block, 3) if stored else None,
    }


def _problem_row(problem: Problem) -> dict[str, str]:
    return {
        "path": problem.path,
        "value": problem.value,
        "expected": problem.expected,
        "hint": problem.hint,
    }


def inspect(path: str) -> dict[str, Any]:
    """Everything that a config says, as the command's JSON form has it.

    Args:
        path: A file in the JSON form of a cache config.
    """
    try:
        projection = Projection(CacheConfig.from_file(path))
    except Error as error:
        return {
            "groups": [],
            "transfer_group_ids": [],
            "store_group_ids": [],
            "scheduler_block_size": None,
            "hash_block_size": None,
            "digest": None,
            "problems": [_problem_row(problem) for problem in error.problems],
        }
    return {
        "groups": [_group_row(group) for group in projection.groups()],
        "transfer_group_ids": [int(group) for group in projection.transfer_group_ids],
        "store_group_ids": [int(group) for group in projection.store_group_ids],
        "scheduler_block_size": projection.scheduler_block_size,
        "hash_block_size": projection.hash_block_size,
        "digest": projection.digest,
        "problems": [_problem_row(problem) for problem in validate_store(projection)],
    }


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _group_cells(group: dict[str, Any]) -> list[str]:
    keys = (
        "id",
        "kind",
        "block_size",
        "tokens_per_block",
        "page_size_bytes",
        "object_bytes",
        "transfer_index",
        "store_index",
        "objects_per_1000_tokens",
        "why_not_stored",
    )
    return [_cell(group[key]) for key in keys]


def _problem_line(problem: dict[str, str]) -> str:
    value = f" = {problem['value']}" if problem["value"] else ""
    hint = f" ({problem['hint']})" if problem["hint"] else ""
    return f"  {problem['path']}{value}: expected {problem['expected']}{hint}"


def run(args: argparse.Namespace) -> int:
    """Prints the report; 2 when the config cannot be used with a store."""
    report = inspect(args.config)
    problems = report["problems"]
    if args.json:
        print(json.dumps(report, indent=2))
        return 2 if problems else 0
    if report["groups"]:
        print(_table([COLUMNS, *(_group_cells(group) for group in report["groups"])]))
        print()
        print(f"scheduler block size  {report['scheduler_block_size']} tokens")
        print(f"hash block size       {report['hash_block_size']} tokens")
        print(f"digest                {report['digest']}")
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        print(f"{args.config}: {count}", *map(_problem_line, problems), sep="\n", file=sys.stderr)
        return 2
    return 0
