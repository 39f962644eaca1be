"""Notes of long runs, for the table of docs/testing.md."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import kvprism

RUNS = Path(__file__).resolve().parents[2] / "build/runs"


def record(name: str, **found: Any) -> None:
    """Writes what a run has found to build/runs, over the run before it."""
    RUNS.mkdir(parents=True, exist_ok=True)
    run = {"date": time.strftime("%Y-%m-%d"), "version": kvprism.__version__, **found}
    (RUNS / f"{name}.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
