#!/usr/bin/env python3
"""Does the comparison with the real vLLM notice deliberate mistakes in the rules?

Compiles the sources that mutants.json names, with every mistake behind a switch, into a library
that takes their place in a process. The comparison of decisions or of objects, as a row says, runs
there once without a mistake, then once for each until an answer differs.

Usage: mutants.py [--cases N] [--only ID]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import kvprism

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build/oracle_mutants"
LIBRARY = BUILD / "libmutants.so"

# At most so many for each mutant in how objects lie.
CACHES = 1_000

sys.path.insert(0, str(HERE.parent / "mutants"))
import run as mechanism  # noqa: E402

# Private helpers that the mutated sources need and the library does not export, and the exported
# units that call private ones: what the library calls inside itself, nobody can replace.
HELPERS = (
    "cpp/src/group/hash128.cpp",
    "cpp/src/layout/disjoint.cpp",
    "cpp/src/layout/segment_map.cpp",
    "cpp/src/store/give_back.cpp",
    "cpp/src/store/plan_check.cpp",
    "cpp/src/store/stage_check.cpp",
    "cpp/src/store/store_worker.cpp",
    "cpp/src/store/worker_calls.cpp",
)


def build(mutants: list[mechanism.Mutant]) -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "mutant.h").write_text(mechanism.HEADER, encoding="utf-8")
    switch = BUILD / "switch.cpp"
    switch.write_text(
        'extern "C" __attribute__((visibility("default"))) int kvprism_mutant;\n'
        "int kvprism_mutant = 0;\n",
        encoding="utf-8",
    )
    files = sorted({mutant.file for mutant in mutants})
    sources = [switch, *(ROOT / name for name in HELPERS if name not in files)]
    for name in files:
        text = (ROOT / name).read_text(encoding="utf-8")
        path = BUILD / Path(name).name
        path.write_text(
            mechanism.mutate(text, [mutant for mutant in mutants if mutant.file == name]),
            encoding="utf-8",
        )
        sources.append(path)
    objects = []
    running = []
    for source in sources:
        objects.append(BUILD / (source.stem + ".o"))
        command = (
            f"{os.environ.get('CXX', 'g++')} -std=c++20 -O1 -DNDEBUG -fPIC -w -c"
            f" -DFMT_HEADER_ONLY=1 -I{ROOT}/cpp/include -I{ROOT}/cpp/src -include {BUILD}/mutant.h"
            f" {source} -o {objects[-1]}"
        )
        running.append(subprocess.Popen(shlex.split(command)))
        if len(running) == 2:
            wait(running)
    wait(running)
    # Loaded before the library, it takes the place of the library's own functions.
    library = Path(kvprism._core.__file__).parent / "lib"
    link = (
        f"{os.environ.get('CXX', 'g++')} -shared -o {LIBRARY} {' '.join(map(str, objects))}"
        # A helper that is missing is told here, not when it is called.
        f" -Wl,-z,defs -L{library} -lkvprism -Wl,-rpath,{library}"
    )
    subprocess.run(shlex.split(link), check=True)


def wait(running: list[subprocess.Popen[bytes]]) -> None:
    for process in running:
        if process.wait() != 0:
            mechanism.fail("compiling failed")
    running.clear()


def judge(mutants: list[mechanism.Mutant], by: dict[str, str], cases: int) -> int:
    import compare
    import objects

    def try_out(comparison: str, cases: int) -> tuple[str, list[str]]:
        if comparison == "objects":
            counts, problems = objects.work(1, min(cases, CACHES), 1)
            return f"{counts['caches']} caches", problems
        counts, problems = compare.work((1, cases), most_problems=1)
        return f"{counts['hits']} hits", problems

    switch = ctypes.c_int.in_dll(ctypes.CDLL(None), "kvprism_mutant")
    problems = [each for name in set(by.values()) for each in try_out(name, min(cases, 3000))[1]]
    if problems:
        print(problems[0])
        mechanism.fail("the comparison fails without any mutant")
    survivors = []
    for mutant in mutants:
        switch.value = mutant.number
        try:
            seen, problems = try_out(by[mutant.id], cases)
            found = problems[0].splitlines()[0] if problems else None
            how = f"after {seen}: {found}"
        except Exception as error:
            found = how = f"raises {type(error).__name__}: {str(error).splitlines()[0]}"
        print(f"{mutant.id:<32} {how[:150] if found else 'SURVIVED'}", flush=True)
        if not found:
            survivors.append(mutant)
    for mutant in survivors:
        print(f"SURVIVED {mutant.id}: {mutant.reason}")
    print(f"{len(mutants) - len(survivors)} died, {len(survivors)} survived")
    return 1 if survivors else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=30_000, help="at most so many for each mutant")
    parser.add_argument("--only", help="the id of one mutant")
    arguments = parser.parse_args()
    rows = HERE / "mutants.json"
    mutants = mechanism.load(rows)
    # Which comparison must notice it: of decisions, unless a row names the one of objects.
    by = {row["id"]: row.get("by", "compare") for row in json.loads(rows.read_text("utf-8"))}
    if "KVPRISM_ORACLE_MUTANTS" not in os.environ:
        began = time.monotonic()
        build(mutants)
        print(f"{len(mutants)} mutants built in {time.monotonic() - began:.0f} s", flush=True)
        environment = dict(os.environ, LD_PRELOAD=str(LIBRARY), KVPRISM_ORACLE_MUTANTS="1")
        return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode
    chosen = [mutant for mutant in mutants if arguments.only in (None, mutant.id)]
    if not chosen:
        mechanism.fail(f"no mutant '{arguments.only}'")
    return judge(chosen, by, arguments.cases)


if __name__ == "__main__":
    sys.exit(main())
