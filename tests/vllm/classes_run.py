"""The tests of what kvprism makes of vLLM's classes, with those of another version."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import vllm

FILES = (
    "test_contract",
    "test_gallery",
    "test_layouts",
    "test_meaning",
    "test_places",
    "test_translation",
)


def main() -> None:
    print(f"vLLM {vllm.__version__}", flush=True)
    files = [str(Path(__file__).with_name(f"{name}.py")) for name in FILES]
    options = ["-q", "-p", "no:cacheprovider", "-o", "filterwarnings=", "-o", "testpaths="]
    sys.exit(pytest.main([*options, *files]))


if __name__ == "__main__":
    main()
