"""The C interface and what checks it speak of the same functions and the same counters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = (ROOT / "cpp/include/kvprism/kvprism.h").read_text("utf-8")
NULLS = (ROOT / "tests/c/interface_test.c").read_text("utf-8").split("null_handles(void)", 1)[1]
COUNTERS = (ROOT / "cpp/src/c_api/counters.cpp").read_text("utf-8")


def declared() -> dict[str, str]:
    """Each function and its parameters."""
    found = re.findall(r"KVPRISM_API [^;(]*?(kvprism_\w+)\(([^;]*?)\);", HEADER, re.DOTALL)
    return {name: " ".join(parameters.split()) for name, parameters in found}


def test_every_function_that_takes_a_handle_is_tried_without_one() -> None:
    functions = declared()
    assert len(functions) > 60
    handles = [
        name for name, parameters in functions.items() if "kvprism_error** error" in parameters
    ]
    untried = [name for name in handles if f"REFUSED({name}(" not in NULLS]
    assert untried == ["kvprism_check_version", "kvprism_set_log_sink"]  # they take none
    freed = [name for name in functions if name.endswith("_free")]
    assert [name for name in freed if f"{name}(NULL)" not in NULLS] == [
        "kvprism_error_free",
        "kvprism_string_free",
    ]


def members(struct: str, header: str) -> str:
    """The text of a C++ struct, without comments."""
    text = re.sub(r"//[^\n]*", "", (ROOT / "cpp/include/kvprism" / header).read_text("utf-8"))
    return text.split(f"struct {struct} {{", 1)[1].split("\n};", 1)[0]


def test_every_wrong_size_is_tried() -> None:
    tests = (ROOT / "tests/c/interface_test.c").read_text("utf-8")
    structs = re.findall(r"typedef struct (\w+) \{\s*size_t struct_size;", HEADER)
    assert len(structs) == 12
    untried = [name for name in structs if not re.search(rf"WRONG_\w*SIZE\({name},", tests)]
    inits = [name for name in structs if f"{name}_init" in declared()]
    untried += [f"{name}_init" for name in inits if f"WRONG_INIT({name})" not in tests]
    assert untried == []


@pytest.mark.parametrize(
    ("c_struct", "structs", "only_in_cpp", "only_in_c"),
    [
        (
            "kvprism_mooncake_options",
            {
                "MooncakeOptions": "backend/mooncake_client.h",
                "BlockingStoreOptions": "backend/blocking_store.h",
            },
            # Where Python imports from; the engine's own setenv(); a folder of tests.
            {"site_packages", "environment", "rdma_device_folder"},
            {"num_rdma_devices"},
        ),
        (
            "kvprism_scheduler_options",
            {"StoreSchedulerOptions": "store/store_scheduler.h"},
            {"flight", "record"},
            {"flight_record_path", "record_to", "checked"},
        ),
        (
            "kvprism_worker_options",
            {"StoreWorkerOptions": "store/store_worker.h"},
            set(),
            {"pump_thread"},
        ),
        (
            "kvprism_memory_pool_options",
            {"MemoryPoolOptions": "backend/memory_store.h"},
            {"unfinished_for"},  # of writers in other processes, which this pool has not
            set(),
        ),
        ("kvprism_key_facts", {"KeyFacts": "key/key_schema.h"}, set(), set()),
        (
            "kvprism_cache_tensor",
            {"CacheTensor": "layout/segment_map.h"},
            set(),
            {"num_layers"},
        ),
    ],
)
def test_options_are_those_of_cpp(
    c_struct: str, structs: dict[str, str], only_in_cpp: set[str], only_in_c: set[str]
) -> None:
    text = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
    body = text.split(f"typedef struct {c_struct} {{", 1)[1].split("}", 1)[0]
    in_c = {name.removesuffix("_ns") for name in re.findall(r"(\w+);", body)} - {"struct_size"}
    in_cpp = {
        re.split(r"[={]", line)[0].split()[-1]
        for struct, header in structs.items()
        for line in members(struct, header).split(";")
        if line.strip() and "operator" not in line
    }
    assert in_cpp - in_c == only_in_cpp
    assert in_c - in_cpp == only_in_c


@pytest.mark.parametrize(
    ("struct", "header", "prefix"),
    [
        ("StoreSchedulerCounters", "store/store_scheduler.h", ""),
        ("LedgerCounters", "job/job_ledger.h", "ledger."),
        ("StoreWorkerCounters", "store/store_worker.h", ""),
        ("StoreGroupCounters", "store/store_worker.h", ""),
        ("BlockingStoreCounters", "backend/blocking_store.h", ""),
    ],
)
def test_every_counter_is_told(struct: str, header: str, prefix: str) -> None:
    names = re.findall(r"(?:std::uint64_t|bool) (\w+)", members(struct, header))
    assert len(names) > 6
    missing = [name for name in names if f'"{prefix}{name}"' not in COUNTERS]
    assert missing == [], "cpp/src/c_api/counters.cpp tells the C interface's callers"
