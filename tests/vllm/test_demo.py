"""The demonstration does what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "vllm" / "demo.py"


@pytest.mark.soak
def test_both_models_answer_the_same_from_an_empty_store_and_from_a_full_one() -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO)], capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith("  the same")]
    assert done.stdout.count("from the store") == 1, done.stdout
    # Whole blocks of 32 are in the store then, but for one that ends its prompt.
    found = ["0", "12512", "12512"]
    assert [(row[0], row[-4]) for row in rows] == [
        (model, hits) for model in ("gemma3", "ring_llama") for hits in found
    ], done.stdout
