"""A benchmark in this process: JSON on stdin, the list of its name and arguments."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path


def main() -> None:
    name, *arguments = json.load(sys.stdin)
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "vllm"))
    sys.argv = [name, *arguments]
    sys.exit(importlib.import_module(name).main())


if __name__ == "__main__":
    main()
