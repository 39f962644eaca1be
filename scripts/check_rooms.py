#!/usr/bin/env python3
"""Checks that includes go downwards only and that rooms keep to what they are for.

Usage: check_rooms.py [ROOT]. Prints one line per problem; the exit status is 1 if there is any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# From the ground up; rooms on one floor do not see each other.
FLOORS = (
    ("base",),
    ("run",),
    ("spec",),
    ("group",),
    ("hash", "hit", "key", "layout"),
    ("wire",),
    ("job",),
    ("io",),
    ("store", "peer"),
    ("backend", "checked"),
    ("c_api", "sim"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# The outside world enters through arguments, everywhere but in backend/.
WORLD_ALLOWED = {"backend"}
WORLD = (
    (
        "clock",
        re.compile(
            r"\b(steady_clock|system_clock|high_resolution_clock|file_clock|clock_gettime"
            r"|gettimeofday|timespec_get)\b|\bstd::time\s*\(|(?<![\w.>:])time\s*\(\s*(nullptr|NULL|0)\s*\)"
        ),
    ),
    ("thread", re.compile(r"\bstd::(thread|jthread|async)\b|\bpthread_create\b|\bfork\s*\(\s*\)")),
    ("sleep", re.compile(r"\b(sleep_for|sleep_until|nanosleep|usleep)\b|(?<![\w.>:])sleep\s*\(")),
    (
        "random number",
        re.compile(r"\brandom_device\b|(?<![\w.>:])s?rand\s*\(|\bstd::s?rand\b|\bgetrandom\b"),
    ),
)
WORLD_HEADERS = {"thread": "thread", "future": "thread", "time.h": "clock", "ctime": "clock"}

PYTHON_HEADER = re.compile(r"^(Python\.h|nanobind/|pybind11/)")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)

# Our declarations of Mooncake's interface serve backend/, and nobody else includes them.
MOONCAKE_SEES = ("base", "backend")

# The oracle judges contents by its own means.
ORACLE = "content_oracle"
ORACLE_FORBIDDEN = ("key", "hit", "layout", "wire")

STD_HEADERS = frozenset(
    re.findall(
        r"\w+",
        """
        algorithm any array atomic barrier bit bitset cassert cctype cerrno cfenv cfloat
        charconv chrono cinttypes climits clocale cmath compare complex concepts
        condition_variable coroutine csetjmp csignal cstdarg cstddef cstdint cstdio cstdlib
        cstring ctime cuchar cwchar cwctype deque exception execution filesystem forward_list
        fstream functional future initializer_list iomanip ios iosfwd iostream istream iterator
        latch limits list locale map memory memory_resource mutex new numbers numeric optional
        ostream queue random ranges ratio regex scoped_allocator semaphore set shared_mutex
        source_location span sstream stack stdexcept stop_token streambuf string string_view
        syncstream system_error thread tuple type_traits typeindex typeinfo unordered_map
        unordered_set utility valarray variant vector version
        """,
    )
)


# The C interface is read by C compilers.
C_INTERFACE = "kvprism.h"
C_HEADERS = frozenset({"stdbool.h", "stddef.h", "stdint.h"})


@dataclass(frozen=True)
class Include:
    line: int
    angle: bool
    name: str


def strip(text: str, *, strings: bool) -> str:
    """Blanks comments (and string literals), keeping every line break."""
    literal = r'R"(?P<d>[^()\\\s]{0,16})\(.*?\)(?P=d)"' + r"|\"(?:\\.|[^\"\\\n])*\""
    char = r"(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'"
    pattern = re.compile(rf"(?P<comment>//[^\n]*|/\*.*?\*/)|{literal}|{char}", re.DOTALL)

    def blank(match: re.Match[str]) -> str:
        if match.group("comment") is None and not strings:
            return match.group(0)
        return re.sub(r"[^\n]", " ", match.group(0))

    return pattern.sub(blank, text)


def includes(text: str) -> list[Include]:
    code = strip(text, strings=False)
    return [
        Include(code.count("\n", 0, match.start(2)) + 1, match.group(1) == "<", match.group(2))
        for match in INCLUDE.finditer(code)
    ]


class Tree:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.public = root / "cpp/include/kvprism"
        self.private = root / "cpp/src"
        self.mooncake = root / "third_party/mooncake"
        self.texts: dict[Path, str] = {}
        for folder in (self.public, self.private, self.mooncake):
            for path in sorted(folder.rglob("*")):
                if path.suffix in (".h", ".cpp"):
                    self.texts[path] = path.read_text(encoding="utf-8")

    def room(self, path: Path) -> str | None:
        """The room a file is in; None for third_party and for what lies in no room."""
        for folder in (self.public, self.private):
            if path.is_relative_to(folder):
                parts = path.relative_to(folder).parts
                return parts[0] if len(parts) > 1 else None
        return None

    def resolve(self, path: Path, name: str) -> Path | None:
        candidates = (
            path.parent / name,
            self.root / "cpp/include" / name,
            self.private / name,
            self.root / "third_party" / name,
        )
        for candidate in candidates:
            if candidate.is_file():
                return candidate.resolve()
        return None

    def where(self, path: Path, line: int) -> str:
        return f"{path.relative_to(self.root)}:{line}"


def check_room_names(tree: Tree) -> Iterator[str]:
    for folder in (tree.public, tree.private):
        if not folder.is_dir():
            continue
        for entry in sorted(folder.iterdir()):
            if entry.is_dir() and entry.name not in FLOOR_OF:
                yield f"{entry.relative_to(tree.root)}: not a room ({', '.join(FLOOR_OF)})"


def check_includes(tree: Tree) -> Iterator[str]:
    for path, text in tree.texts.items():
        room = tree.room(path)
        public = path.is_relative_to(tree.public)
        c_headers = C_HEADERS if path == tree.public / C_INTERFACE else frozenset()
        for include in includes(text):
            where = tree.where(path, include.line)
            if PYTHON_HEADER.match(include.name):
                yield f"{where}: <{include.name}> belongs in bindings/"
                continue
            if public and include.angle and include.name not in STD_HEADERS | c_headers:
                yield f"{where}: public headers include only std and kvprism/, not <{include.name}>"
                continue
            if public and not include.angle and not include.name.startswith("kvprism/"):
                yield f'{where}: public headers say "kvprism/...", not "{include.name}"'
                continue
            if room is not None and room not in WORLD_ALLOWED and include.name in WORLD_HEADERS:
                yield f"{where}: <{include.name}> ({WORLD_HEADERS[include.name]}) in {room}/"
            if include.name == "kvprism/base/version.h":  # generated
                continue
            target = tree.resolve(path, include.name)
            if target is None:
                if not include.angle:
                    yield f'{where}: "{include.name}" does not exist'
                continue
            target_room = tree.room(target)
            if target.is_relative_to(tree.mooncake):
                if room is not None and room != "backend":
                    yield f'{where}: only backend/ knows Mooncake ("{include.name}")'
            elif room is None:
                if path.is_relative_to(tree.mooncake) and target_room not in (None, *MOONCAKE_SEES):
                    yield f"{where}: third_party/mooncake must not see {target_room}/"
            elif target_room is None and (room, target.name) == ("c_api", C_INTERFACE):
                continue
            elif target_room is None:
                yield f'{where}: {room}/ includes "{include.name}", which is in no room'
            elif target_room != room and room in FLOOR_OF and target_room in FLOOR_OF:
                if FLOOR_OF[target_room] > FLOOR_OF[room]:
                    yield f"{where}: {room}/ looks up to {target_room}/"
                elif FLOOR_OF[target_room] == FLOOR_OF[room]:
                    yield f"{where}: {room}/ and {target_room}/ are on one floor"


def check_world(tree: Tree) -> Iterator[str]:
    for path, text in tree.texts.items():
        room = tree.room(path)
        if room is None or room in WORLD_ALLOWED:
            continue
        for number, line in enumerate(strip(text, strings=True).splitlines(), 1):
            for what, pattern in WORLD:
                if match := pattern.search(line):
                    found = match.group(0).strip()
                    yield f"{tree.where(path, number)}: {what} ({found}) in {room}/"


def check_pragma_once(tree: Tree) -> Iterator[str]:
    for path, text in tree.texts.items():
        if path.suffix == ".h" and not re.search(r"^#pragma once$", text, re.MULTILINE):
            yield f"{path.relative_to(tree.root)}: no #pragma once"


def check_oracle(tree: Tree) -> Iterator[str]:
    for start in tree.texts:
        if tree.room(start) != "sim" or not start.name.startswith(ORACLE):
            continue
        seen = {start}
        queue: list[tuple[Path, str]] = [(start, start.name)]
        while queue:
            path, trail = queue.pop()
            for include in includes(tree.texts.get(path, "")):
                target = tree.resolve(path, include.name)
                if target is None or target in seen:
                    continue
                seen.add(target)
                way = f"{trail} -> {include.name}"
                if tree.room(target) in ORACLE_FORBIDDEN:
                    yield f"{start.relative_to(tree.root)}: the oracle must not see {way}"
                else:
                    queue.append((target, way))


def check(root: Path) -> list[str]:
    tree = Tree(root.resolve())
    problems: list[str] = []
    for rule in (check_room_names, check_includes, check_world, check_pragma_once, check_oracle):
        problems.extend(rule(tree))
    return problems


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).parent.parent
    problems = check(root)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
