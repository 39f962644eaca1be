"""The API server in this process, as ``python -m`` would run it: JSON on stdin, its arguments.

The engine's process is a copy of this one, where vLLM on CPU would import everything anew.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import runpy
import sys
from typing import Any


def main() -> None:
    arguments = json.load(sys.stdin)
    utils: Any = importlib.import_module("vllm.v1.engine.utils")
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    sys.argv = ["api_server", *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
