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
    # The second time whole blocks of 32 are in the store, but for one that ends its prompt.
    assert [row[-4] for row in rows] == ["0", "12512", "0", "12512"], done.stdout
