"""The command ``kvprism``: one subcommand a module, imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Each module offers add_arguments(parser) and run(args) -> int.
COMMANDS = {
    "demo": ("kvprism.demo", "save, look up and load a hybrid cache on this machine"),
    "doctor": ("kvprism.doctor", "check what a store needs from this machine"),
    "inspect": (
        "kvprism.inspect_config",
        "show what a cache config means and what is wrong with it",
    ),
    "replay": ("kvprism.replay", "replay a trace of requests against a simulated engine"),
}

# Usage errors and input that cannot be used, as argparse has it.
EXIT_UNUSABLE = 2


def cmake_dir() -> Path:
    """Directory of the CMake package, for ``find_package(kvprism)``."""
    from . import _core

    return Path(_core.__file__).resolve().parent / "lib" / "cmake" / "kvprism"


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    from . import __version__

    parser = argparse.ArgumentParser(
        prog="kvprism", description="KV-cache storage and transfer for hybrid models."
    )
    parser.add_argument("--version", action="version", version=f"kvprism {__version__}")
    parser.add_argument(
        "--cmake-dir", action="store_true", help="print the directory of the CMake package"
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, (module, summary) in COMMANDS.items():
        description = summary[0].upper() + summary[1:] + "."
        command = commands.add_parser(name, help=summary, description=description)
        if name == chosen:
            implementation = importlib.import_module(module)
            implementation.add_arguments(command)
            command.set_defaults(run=implementation.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Args:
        argv: Arguments without the program's name; None takes the process's own.
    """
    from ._core import Error

    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    parser = _parser(chosen)
    args = parser.parse_args(arguments)
    if args.cmake_dir:
        print(cmake_dir())
        return 0
    if args.command is None:
        parser.print_help()
        return EXIT_UNUSABLE
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except Error as error:
        print(f"kvprism {args.command}: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except BrokenPipeError:
        # The reader has seen enough. What is left in the buffer must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status
