#!/usr/bin/env python3
"""Writes cmake/sources.cmake, the explicit list of the files CMake builds.

Usage: freeze_sources.py [--check | --thaw]. Without arguments the list is written. --check compares
it with the tree and fails if they differ; a tree without the list passes, as CMake then searches.
--thaw removes it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "cmake/sources.cmake"

# Files directly in these folders; rooms are found below the first two.
ROOM_PARENTS = ("cpp/include/kvprism", "cpp/src")
FOLDERS = (
    "cpp/include/kvprism",
    "third_party/mooncake",
    "bindings",
    "tests/c",
    "tests/cpp",
    "tests/fuzz",
    "benchmarks/cpp",
)
SUFFIXES = (".c", ".cpp", ".h")


def source_files() -> list[str]:
    folders = [ROOT / folder for folder in FOLDERS]
    for parent in ROOM_PARENTS:
        if (ROOT / parent).is_dir():
            folders.extend(path for path in (ROOT / parent).iterdir() if path.is_dir())
    files = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        if folder.is_dir()
        for path in folder.iterdir()
        if path.suffix in SUFFIXES and path.is_file()
    }
    return sorted(files)


def render(files: list[str]) -> str:
    lines = [
        "# Written by scripts/freeze_sources.py; run it again after adding or removing a file.",
        "set(",
        "  KVPRISM_SOURCES",
        *(f"  {file}" for file in files),
        ")",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Keeps cmake/sources.cmake in step with the tree.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare, write nothing")
    mode.add_argument("--thaw", action="store_true", help="remove the list")
    options = parser.parse_args()

    if options.thaw:
        LIST.unlink(missing_ok=True)
        return 0
    want = render(source_files())
    if not options.check:
        LIST.write_text(want, encoding="utf-8")
        return 0
    if not LIST.exists():
        return 0
    have = LIST.read_text(encoding="utf-8")
    if have == want:
        return 0
    listed, found = set(have.splitlines()), set(want.splitlines())
    for line in sorted(found - listed):
        print(f"not in cmake/sources.cmake: {line.strip()}")
    for line in sorted(listed - found):
        print(f"in cmake/sources.cmake, not in the tree: {line.strip()}")
    print("run scripts/freeze_sources.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
