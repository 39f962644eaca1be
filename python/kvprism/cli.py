"""The command ``kvprism``: one subcommand a module, imported only when it is asked for."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

# Each module offers add_arguments(parser) and run(args) -> int.
COMMANDS = {
    "demo": ("kvprism.demo", "save, look up and load a hybrid cache on this machine"),
    "doctor": ("kvprism.doctor", "check what a store needs from this machine"),
    "inspect": (
        "kvprism.inspect_config",
        "show what a cache config means and what is wrong with it",
    ),
    "replay": ("kvprism.replay", "replay a trace of requests against a simulated engine"),
    "replay-run": ("kvprism.replay_run", "repeat the decisions of a recorded scheduler"),
}

# Usage errors and input that cannot be used, as argparse has it.
EXIT_UNUSABLE = 2
# As shells have it: 128 and the signal's number.
EXIT_SIGNAL = 128


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


def _end(number: int, frame: FrameType | None) -> None:
    # What the command has started is ended on the way out; a second signal must not cut that short.
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(EXIT_SIGNAL + number)


def _silence() -> None:
    """Lets what is left in the buffer of a broken output go nowhere: it must not raise at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Args:
        argv: Arguments without the program's name; None takes the process's own.
    """
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for each in (signal.SIGTERM, signal.SIGHUP):
                # Whoever ignores a signal, as nohup does, goes on doing so.
                if signal.getsignal(each) == signal.SIG_DFL:
                    signal.signal(each, _end)
                    stack.callback(signal.signal, each, signal.SIG_DFL)
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        except KeyboardInterrupt:
            return EXIT_SIGNAL + signal.SIGINT


def _main(arguments: list[str]) -> int:
    from ._core import Error

    chosen = next((word for word in arguments if not word.startswith("-")), None)
    name = f"kvprism {chosen}" if chosen in COMMANDS else "kvprism"
    if sys.stdout is None:
        print(f"{name}: standard output is closed", file=sys.stderr)
        return 1
    # A file's name that is not UTF-8 can still be told.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(arguments, chosen)
        finally:
            sys.stdout.flush()
    except Error as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except MemoryError as error:
        print(f"{name}: not enough memory {error}".rstrip(), file=sys.stderr)
        return EXIT_UNUSABLE
    except BrokenPipeError:
        # The reader has seen enough.
        _silence()
        return 0
    except OSError as error:
        _silence()
        if error.filename is None:
            print(f"{name}: {error.strerror or error}", file=sys.stderr)
            return 1
        print(f"{name}: {os.fsdecode(error.filename)}: {error.strerror}", file=sys.stderr)
        return EXIT_UNUSABLE


def _run(arguments: list[str], chosen: str | None) -> int:
    parser = _parser(chosen)
    args = parser.parse_args(arguments)
    if args.cmake_dir:
        print(cmake_dir())
        return 0
    if args.command is None:
        parser.print_help()
        return EXIT_UNUSABLE
    status: int = args.run(args)
    return status
