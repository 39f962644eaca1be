#!/usr/bin/env python3
"""Does the simulation notice deliberate mistakes?

Builds a copy of the sources in build/mutants with every mistake of mutants.json in it, each behind
a switch, and runs the simulation once per mistake until an invariant breaks. A mistake that
survives means a missing invariant.

Usage: run.py [--seeds N] [--only ID] [--jobs N]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build/mutants"
SOURCE = BUILD / "source"

# What the simulation is built from.
COPIED = ("cmake", "cpp", "third_party", "tests/cpp/simulation_main.cpp")
# Nothing of it takes part.
EXCLUDED = re.compile(
    r"^cpp/src/backend/(mooncake|preflight|blocking)|^cpp/src/(c_api|checked|hash)/"
    r"|^third_party/.*\.cpp$"
)
HEADER = '#pragma once\nextern "C" int kvprism_mutant;\n'
FAILED = re.compile(r"^FAILED seed (\d+) event (\d+) \[([^]]*)\] (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    number: int
    id: str
    file: str
    find: str
    fault: str
    reason: str
    within: str
    statement: bool
    preamble: tuple[str, ...]
    seeds: int  # worlds that it needs at most; 0: as many as the others
    only: str  # the kind of fault without which nobody would notice; "": several do

    def wrap(self, right: str) -> str:
        test = f"kvprism_mutant == {self.number}"
        if self.statement:
            return f"if ({test}) {{ {self.fault} }} else {{ {right} }}"
        return f"({test} ? ({self.fault}) : ({right}))"


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    died: bool
    how: str
    seconds: float


def fail(message: str) -> None:
    print(f"mutants: {message}", file=sys.stderr)
    sys.exit(2)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A row; JSON takes the last of two equal names, and a mutant would be lost."""
    row = dict(pairs)
    if len(row) != len(pairs):
        fail(f"a name stands twice in one row: {[name for name, _ in pairs]}")
    return row


def load(path: Path = HERE / "mutants.json") -> list[Mutant]:
    mutants = []
    rows = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    for number, row in enumerate(rows, 1):
        mutants.append(
            Mutant(
                number=number,
                id=row["id"],
                file=row["file"],
                find=row["find"],
                fault=row["fault"],
                reason=row["reason"],
                within=row.get("within", row["find"]),
                statement=row.get("statement", False),
                preamble=tuple(row.get("preamble", ())),
                seeds=row.get("seeds", 0),
                only=row.get("only", ""),
            )
        )
    if len({mutant.id for mutant in mutants}) != len(mutants):
        fail("two mutants have one id")
    return mutants


def pattern(code: str) -> str:
    """Matches the code however it is broken into lines."""
    return r"\s*".join(re.escape(token) for token in re.findall(r"\w+|[^\w\s]", code))


def place(mutant: Mutant, text: str) -> tuple[int, int]:
    """Where the mutant's text stands; it must be unique."""
    found = list(re.finditer(pattern(mutant.within), text))
    if len(found) != 1:
        fail(f"{mutant.id}: {len(found)} places instead of one in {mutant.file}: {mutant.within}")
    inside = list(re.finditer(pattern(mutant.find), found[0].group(0)))
    if len(inside) != 1:
        fail(f"{mutant.id}: 'find' must stand once in 'within'")
    return found[0].start() + inside[0].start(), found[0].start() + inside[0].end()


def mutate(text: str, mutants: list[Mutant]) -> str:
    spans: dict[tuple[int, int], str] = {}
    for mutant in mutants:
        span = place(mutant, text)
        spans[span] = mutant.wrap(spans.get(span, mutant.find))
    ordered = sorted(spans)
    for before, after in itertools.pairwise(ordered):
        if before[1] > after[0]:
            fail(f"two mutants overlap: {text[before[0] : after[1]]}")
    for start, end in reversed(ordered):
        text = text[:start] + spans[start, end] + text[end:]
    preamble = [line for mutant in mutants for line in mutant.preamble]
    if preamble:
        # Behind the includes, which come first in every source.
        last = list(re.finditer(r"^#include .*\n", text, re.MULTILINE))[-1].end()
        text = text[:last] + "\n" + "\n".join(preamble) + "\n" + text[last:]
    return text


def write_if_changed(path: Path, text: str) -> None:
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def copy_sources(mutants: list[Mutant]) -> None:
    by_file: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_file.setdefault(mutant.file, []).append(mutant)
    kept: set[Path] = set()
    for name in COPIED:
        origin = ROOT / name
        for path in sorted(origin.rglob("*")) if origin.is_dir() else [origin]:
            place_in_copy = path.relative_to(ROOT).as_posix()
            if not path.is_file() or EXCLUDED.match(place_in_copy):
                continue
            text = path.read_text(encoding="utf-8")
            if place_in_copy in by_file:
                text = mutate(text, by_file.pop(place_in_copy))
            write_if_changed(SOURCE / place_in_copy, text)
            kept.add(SOURCE / place_in_copy)
    top = SOURCE / "CMakeLists.txt"
    write_if_changed(top, (HERE / "CMakeLists.txt").read_text(encoding="utf-8"))
    kept.add(top)
    if by_file:
        fail(f"no such file: {', '.join(by_file)}")
    for path in SOURCE.rglob("*"):
        if path.is_file() and path not in kept:
            path.unlink()
    write_if_changed(BUILD / "mutant.h", HEADER)


def run_or_fail(command: list[str], what: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        print(result.stdout[-6000:], result.stderr[-6000:], sep="\n", file=sys.stderr)
        fail(f"{what} failed")


def build() -> Path:
    tree = BUILD / "tree"
    command = [
        *("cmake", "-S", str(SOURCE), "-B", str(tree), "-DCMAKE_BUILD_TYPE=Release"),
        *("-DBUILD_SHARED_LIBS=OFF", "-DKVPRISM_WERROR=OFF"),
        "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",
        f"-DCMAKE_CXX_FLAGS=-include {BUILD / 'mutant.h'}",
    ]
    if shutil.which("ninja"):
        command += ["-G", "Ninja"]
    run_or_fail(command, "configuring")
    run_or_fail(
        ["cmake", "--build", str(tree), "--target", "kvprism_simulation", "-j", "2"], "building"
    )
    programs = [path for path in tree.rglob("kvprism_simulation") if path.is_file()]
    if len(programs) != 1:
        fail("no program kvprism_simulation")
    return programs[0]


def judge(program: Path, mutant: Mutant, seeds: int, seed_seconds: float) -> Verdict:
    """`seed_seconds`: of a seed without a mutant. Twenty times that are no end."""
    began = time.monotonic()
    limit = 60 + 20 * seed_seconds * max(seeds, mutant.seeds)
    command = [
        str(program),
        "--mutant",
        str(mutant.number),
        "--seeds",
        str(max(seeds, mutant.seeds)),
        "--stop-at-first",
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return Verdict(mutant, True, f"has no end within {limit:.0f} s", time.monotonic() - began)
    seconds = time.monotonic() - began
    if found := FAILED.search(result.stdout):
        seed, event, invariant, what = found.groups()
        how = f"seed {seed}, event {event}, {invariant}: {what}"
        if mutant.only and (other := dies_without(program, mutant, int(seed), limit)):
            return Verdict(mutant, False, f"needs no '{mutant.only}': {other}", seconds)
        return Verdict(mutant, True, how, seconds)
    if result.returncode < 0:
        return Verdict(mutant, True, f"crashes with signal {-result.returncode}", seconds)
    return Verdict(mutant, False, "SURVIVED", seconds)


def dies_without(program: Path, mutant: Mutant, seeds: int, limit: float) -> str:
    """What finds the mistake in the same worlds where its kind of fault is left out, or ""."""
    command = [str(program), "--mutant", str(mutant.number), "--seeds", str(seeds)]
    command += ["--stop-at-first", "--without", mutant.only]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {limit:.0f} s"
    found = FAILED.search(result.stdout)
    if found is None and result.returncode != 0:
        fail(f"{mutant.id}: {result.stdout[-1000:]}{result.stderr[-1000:]}")
    return found.group(0) if found else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seeds", type=int, default=300, help="at most so many worlds for each mutant"
    )
    parser.add_argument("--only", help="the id of one mutant")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()

    began = time.monotonic()
    mutants = load()
    copy_sources(mutants)
    program = build()
    print(f"{len(mutants)} mutants built in {time.monotonic() - began:.0f} s")
    began_healthy = time.monotonic()
    healthy = subprocess.run(
        [str(program), "--seeds", "50"], capture_output=True, text=True, check=False
    )
    seed_seconds = (time.monotonic() - began_healthy) / 50
    if healthy.returncode != 0:
        print(healthy.stdout[-4000:])
        fail("the simulation fails without any mutant")
    chosen = [mutant for mutant in mutants if arguments.only in (None, mutant.id)]
    if not chosen:
        fail(f"no mutant '{arguments.only}'")
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        verdicts = list(
            pool.map(lambda mutant: judge(program, mutant, arguments.seeds, seed_seconds), chosen)
        )

    width = max(len(verdict.mutant.id) for verdict in verdicts)
    for verdict in verdicts:
        print(f"{verdict.mutant.id:<{width}}  {verdict.seconds:4.1f} s  {verdict.how[:150]}")
    survivors = [verdict for verdict in verdicts if not verdict.died]
    for verdict in survivors:
        print(f"SURVIVED {verdict.mutant.id}: {verdict.mutant.reason}")
    died = len(verdicts) - len(survivors)
    print(f"{died} died, {len(survivors)} survived, {time.monotonic() - began:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
