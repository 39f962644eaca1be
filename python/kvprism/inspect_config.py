"""``kvprism inspect``: what a cache config means, and everything that is wrong with it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Container, Sequence
from typing import Any

from . import CacheConfig, Error, Group, Problem, Projection, validate_peer, validate_store

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


def _hit(group: Group, inside_blocks: bool) -> str:
    if group.hit == "never":
        if group.replay_tokens:
            return f"A hit leaves {group.replay_tokens} tokens to compute, which make it whole."
        return "No hit needs it."
    needs = {
        "prefix": "every block of its prefix",
        "window": f"the blocks of its last {max(1, group.window - 1)} tokens",
        "chunk": f"the blocks since the last multiple of {group.window} tokens",
        "last_state": "the one state at its end",
    }[group.hit]
    inside = " and may end inside a block" if inside_blocks and group.fine_grained_lookup else ""
    return f"A hit needs {needs}{inside}."


SAVES = {
    "positional": "Saved from the present block table.",
    "hand_off": "Saved when the engine hands a state over.",
    "never": "Never saved.",
}
PEERS = {
    "suffix": "A peer gets the blocks that it lacks.",
    "window": "A peer gets the last blocks, as far as attention looks back.",
    "state": "A peer gets the state.",
    "whole": "A peer gets the whole of it.",
    "none": "A peer gets nothing of it.",
}


def explain(group: Group, inside_blocks: bool, pipeline_size: int = 1) -> str:
    """What the rules of a group mean, in sentences.

    Args:
        group: A row of a projection.
        inside_blocks: Whether hits may end inside a block.
        pipeline_size: How many pipeline stages there are.
    """
    if not group.enable_kv_transfer:
        return "Neither stored nor sent to a peer: the engine keeps it to itself."
    words = [_hit(group, inside_blocks), SAVES[group.save], PEERS[group.peer]]
    if len(group.stages) < pipeline_size:
        words.append(f"Only on pipeline stages {', '.join(map(str, group.stages))}.")
    return " ".join(words)


def _group_row(group: Group, inside_blocks: bool, pipeline_size: int) -> dict[str, Any]:
    stored = group.store_index is not None
    kinds = sorted(set(group.layer_kinds)) or [group.kind]
    return {
        "id": int(group.id),
        "kind": group.kind if len(kinds) == 1 else ", ".join(kinds),
        "layers": list(group.layers),
        "pipeline_stages": group.stages,
        "block_size": group.block_size,
        "tokens_per_block": group.tokens_per_block,
        "page_size_bytes": group.page_size_bytes,
        "layer_page_bytes": group.layer_page_bytes,
        "object_bytes": group.object_bytes,
        "transfer_index": None if group.transfer_index is None else int(group.transfer_index),
        "store_index": None if group.store_index is None else int(group.store_index),
        "why_not_stored": group.why_not_stored or None,
        "hit": group.hit,
        "save": group.save,
        "peer": group.peer,
        "replay_tokens": group.replay_tokens,
        "explanation": explain(group, inside_blocks, pipeline_size),
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
            "hit_alignment": None,
            "digest": None,
            "problems": [_problem_row(problem) for problem in error.problems],
            "peer_problems": [],
        }
    inside_blocks = projection.hit_alignment < projection.scheduler_block_size
    return {
        "groups": [
            _group_row(group, inside_blocks, projection.parallel.pp)
            for group in projection.groups()
        ],
        "transfer_group_ids": [int(group) for group in projection.transfer_group_ids],
        "store_group_ids": [int(group) for group in projection.store_group_ids],
        "scheduler_block_size": projection.scheduler_block_size,
        "hash_block_size": projection.hash_block_size,
        "hit_alignment": projection.hit_alignment,
        "digest": projection.digest,
        "problems": [_problem_row(problem) for problem in validate_store(projection)],
        "peer_problems": [_problem_row(problem) for problem in validate_peer(projection)],
    }


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _table(rows: Sequence[Sequence[str]], left: Container[int] = LEFT) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
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
    cells = {key: _cell(group[key]) for key in keys}
    pages = group["layer_page_bytes"]
    if len(set(pages)) > 1:
        cells["page_size_bytes"] = f"{min(pages)}..{max(pages)}"
    return list(cells.values())


def _explanations(groups: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each kind and explanation, with the groups that share it."""
    ids: dict[tuple[str, str], list[str]] = {}
    for group in groups:
        ids.setdefault((group["kind"], group["explanation"]), []).append(str(group["id"]))
    return [[",".join(of), *what] for what, of in ids.items()]


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
        print(_table(_explanations(report["groups"]), {0, 1, 2}))
        print()
        print(f"scheduler block size  {report['scheduler_block_size']} tokens")
        print(f"hash block size       {report['hash_block_size']} tokens")
        if report["hit_alignment"] != report["scheduler_block_size"]:
            print(f"hit alignment         {report['hit_alignment']} tokens")
        print(f"digest                {report['digest']}")
    if report["peer_problems"]:
        print("not usable with a peer", *map(_problem_line, report["peer_problems"]), sep="\n")
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        print(f"{args.config}: {count}", *map(_problem_line, problems), sep="\n", file=sys.stderr)
        return 2
    return 0
