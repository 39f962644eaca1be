"""``kvprism demo``: a hybrid cache is saved, its engine ends, another one loads it and compares."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from .. import MemoryPool, UnavailableError, __version__, memory_store
from . import audit, engine, report, workload

# Both variants with room to spare, so that the master evicts nothing.
_STORAGE_BYTES = 768 << 20
_CHILD_SECONDS = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``kvprism demo``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--store",
        choices=("mooncake", "memory"),
        default="mooncake",
        help="a real Mooncake on this machine, or the memory of this process",
    )


def _child(name: str, master: str, histories: engine.History | None) -> dict[str, Any]:
    from ..local_mooncake import die_with_parent

    task = {"variant": name, "master": master, "histories": histories}
    try:
        done = subprocess.run(
            # Without the working directory in its path, where anybody's json.py may lie.
            [sys.executable, "-P", "-m", f"{__name__}.engine"],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            timeout=_CHILD_SECONDS,
            check=False,
            preexec_fn=die_with_parent(),
        )
    except subprocess.TimeoutExpired as error:
        # Bytes, whatever `text` says.
        sys.stderr.write((error.stderr or b"").decode(errors="replace"))
        raise UnavailableError(
            f"the engine of variant {name} did not end in {_CHILD_SECONDS:g} s"
        ) from None
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        raise UnavailableError(f"the engine of variant {name} ended with {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _judge(
    variant: workload.Variant,
    filled: dict[str, Any],
    loaded: dict[str, Any],
    objects: tuple[list[str], audit.Read],
) -> report.Row:
    texts = [filled["probe"], *filled["histories"], *loaded["histories"]]
    rings = audit.ring_detector(variant.projection, texts)
    stored = audit.audit(variant, *objects, rings)
    return report.judge(variant, filled, loaded, stored, rings.patterns)


def _on_mooncake() -> tuple[str, list[report.Row]]:
    from ..local_mooncake import LocalMooncake

    variants = [workload.variant(name) for name in workload.VARIANTS]
    rows = []
    with LocalMooncake(storage_bytes=_STORAGE_BYTES) as server:
        runs = []
        for variant in variants:
            filled = _child(variant.name, server.master, None)
            loaded = _child(variant.name, server.master, filled["histories"])
            runs.append((variant, filled, loaded))
        objects = audit.mooncake_objects(server.master, server.metrics)
        for variant, filled, loaded in runs:
            rows.append(_judge(variant, filled, loaded, objects))
    return runs[0][1]["store"], rows


def _in_memory() -> tuple[str, list[report.Row]]:
    rows = []
    for name in workload.VARIANTS:
        variant = workload.variant(name)
        pool = MemoryPool()
        filled = engine.fill(variant, memory_store(pool))
        loaded = engine.load(variant, memory_store(pool), filled["histories"])
        rows.append(_judge(variant, filled, loaded, audit.pool_objects(pool)))
    return "memory", rows


def run(args: argparse.Namespace) -> int:
    """Runs ``kvprism demo``; 0 only when all that it is to show has been seen."""
    begin = time.monotonic()
    store, rows = _in_memory() if args.store == "memory" else _on_mooncake()
    seconds = time.monotonic() - begin
    failures = [f"{row['variant']}: {text}" for row in rows for text in row["failures"]]
    if args.json:
        result = {
            "store": store,
            "variants": rows,
            "passed": not failures,
            "failures": failures,
            "seconds": round(seconds, 3),
        }
        print(json.dumps(result))
        return 1 if failures else 0

    print(f"kvprism {__version__} on {store}\n")
    for row in rows:
        print(f"-- {row['variant']}: {' + '.join(group['kind'] for group in row['groups'])}")
        print(report.show(row) + "\n")
    for text in failures:
        print(f"FAILED  {text}")
    if not failures:
        print("rings stayed out of the store, and travel only with transfers")
        verified = sum(row["bytes_verified"] for row in rows)
        print(
            f"PASSED  all {verified:,} bytes loaded after the restart are right ({seconds:.1f} s)"
        )
    return 1 if failures else 0
