#!/usr/bin/env python3
"""Do unit tests notice deliberate mistakes where the simulated world does not come?

That is in threads, and in a worker's limits. Compiles the sources that have the mistakes of
units.json, each behind a switch, links them with some test programs of build/release, and runs for
each mistake the test that must fail. One that makes it hang survives, unless its row says "hangs".

Usage: units.py [--only ID]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from run import HEADER, HERE, ROOT, fail, load, mutate, run_or_fail, unique, write_if_changed

BUILD = ROOT / "build/mutants-units"
RELEASE = ROOT / "build/release"
OBJECTS = RELEASE / "cpp/CMakeFiles/kvprism_objects.dir"
TESTS = RELEASE / "tests/cpp/CMakeFiles"
MOONCAKE = RELEASE / "cpp/CMakeFiles/kvprism_mooncake.dir"
TEST_OBJECTS = tuple(
    TESTS / f"{name}.dir/{name}.cpp.o"
    for name in (
        "backend_internal_test",
        "blocking_bounds_test",
        "blocking_close_test",
        "blocking_replacement_test",
        "blocking_store_test",
        "blocking_threads_test",
        "job_ledger_test",
        "native_calls_internal_test",
        "pump_thread_test",
        "prompt_end_test",
        "purge_test",
        "scheduler_exceptions_test",
        "scheduler_load_test",
        "store_scheduler_test",
        "store_worker_test",
        "worker_exceptions_test",
        "worker_limits_test",
        "worker_plans_test",
    )
)
SWITCH = """#include <cstdlib>
extern "C" int kvprism_mutant;
int kvprism_mutant = std::getenv("KVPRISM_MUTANT") ? std::atoi(std::getenv("KVPRISM_MUTANT")) : 0;
"""
ROW = json.loads((HERE / "units.json").read_text("utf-8"), object_pairs_hook=unique)
TEST_OF = {row["id"]: row["test"] for row in ROW}
HANGS = {row["id"] for row in ROW if row.get("hangs")}
BOUND_SECONDS = 30.0  # of one test, which takes some seconds at most


def build() -> Path:
    """The test program with every mistake in it."""
    mutants = load(HERE / "units.json")
    sources = {}
    for file in sorted({mutant.file for mutant in mutants}):
        text = mutate(
            (ROOT / file).read_text("utf-8"), [mutant for mutant in mutants if mutant.file == file]
        )
        sources[file] = BUILD / file.replace("/", "-")
        write_if_changed(sources[file], text)
    write_if_changed(BUILD / "mutant.h", HEADER)
    write_if_changed(BUILD / "switch.cpp", SWITCH)
    sources["switch.cpp"] = BUILD / "switch.cpp"
    includes = [
        *(ROOT / folder for folder in ("cpp/include", "cpp/src", "third_party")),
        RELEASE / "generated/include",
    ]
    common = ["ccache"] if shutil.which("ccache") else []
    common += ["g++", "-std=c++20", "-O0", "-DFMT_HEADER_ONLY", "-include", str(BUILD / "mutant.h")]
    common += [f"-I{folder}" for folder in includes]

    def compile_one(file: str) -> str:
        target = BUILD / (file.replace("/", "-") + ".o")
        run_or_fail([*common, "-c", str(sources[file]), "-o", str(target)], f"compiling {file}")
        return str(target)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        objects = list(pool.map(compile_one, sources))
    # All else as it has been built, and not the library, which exports no details.
    mistaken = {OBJECTS / f"{file.removeprefix('cpp/')}.o" for file in sources}
    built = (*OBJECTS.rglob("*.o"), *MOONCAKE.rglob("*.o"))
    objects += [str(path) for path in built if path not in mistaken]
    objects += map(str, TEST_OBJECTS)
    program = BUILD / "units"
    run_or_fail(
        [
            *("g++", "-o", str(program), *objects),
            *("-lgmock_main", "-lgmock", "-lgtest", "-lpthread", "-ldl"),
        ],
        "linking",
    )
    return program


def verdict(program: Path, number: int, test: str) -> str:
    """What becomes of a test with one mistake, 0 for none: passes, fails or hangs."""
    try:
        result = subprocess.run(
            [str(program), f"--gtest_filter=*.{test}", "--gtest_brief=1"],
            env={**os.environ, "KVPRISM_MUTANT": str(number)},
            capture_output=True,
            text=True,
            timeout=BOUND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if "0 tests ran" in result.stdout or "0 tests from" in result.stdout:
        fail(f"no test {test}")
    return "passes" if result.returncode == 0 else "fails"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="the id of one mutant")
    arguments = parser.parse_args()
    began = time.monotonic()
    mutants = load(HERE / "units.json")
    program = build()
    for test in sorted(set(TEST_OF.values())):
        if (of := verdict(program, 0, test)) != "passes":
            fail(f"{test} {of} without any mutant")
    chosen = [mutant for mutant in mutants if arguments.only in (None, mutant.id)]
    if not chosen:
        fail(f"no mutant '{arguments.only}'")
    died = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        verdicts = pool.map(lambda m: verdict(program, m.number, TEST_OF[m.id]), chosen)
        for mutant, of in zip(chosen, verdicts, strict=True):
            if of == ("hangs" if mutant.id in HANGS else "fails"):
                died += 1
            else:
                print(f"SURVIVED {mutant.id}: {TEST_OF[mutant.id]} {of}: {mutant.reason}")
    seconds = time.monotonic() - began
    print(f"{died} died by unit tests, {len(chosen) - died} survived, {seconds:.0f} s")
    return 0 if died == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
