"""``kvprism replay-run``: repeats the decisions of a recorded scheduler, bit for bit."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ._core import replay_run

# As cmp and diff have it.
EXIT_DIFFERENT = 1
_MAGIC = b"KVPR"
_HEADER_BYTES = 4096  # more than any header, so that its magic number is what is told


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument(
        "file",
        type=Path,
        help="what StoreScheduler(record_to=...) has written; for an engine with kinds of cache of"
        " its own, call kvprism._core.replay_run with its registry",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _read(path: Path) -> bytes:
    """The recording; of anything else, which may have no end, only its beginning."""
    with path.open("rb") as file:
        head = file.read(len(_MAGIC))
        return head + file.read() if head == _MAGIC else head.ljust(_HEADER_BYTES, b"\0")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    result = replay_run(_read(args.file))
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{result['calls']} calls, {result['steps']} steps, {result['plans']} with a plan")
        if result["ignored_bytes"]:
            print(f"{result['ignored_bytes']} bytes of a last call that was cut off were ignored")
        if not result["ended"]:
            print(
                "the recording has no end: its program was killed or still runs, its disk was full,"
                " or its scheduler was not destroyed"
            )
        if result["recorded_by"] != result["repeated_by"]:
            print(f"recorded by {result['recorded_by']}, repeated by {result['repeated_by']}")
        print("the same" if result["same"] else f"DIFFERENT: {result['difference']}")
    return 0 if result["same"] else EXIT_DIFFERENT
