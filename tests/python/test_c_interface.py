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


@pytest.mark.parametrize(
    ("struct", "header", "prefix"),
    [
        ("StoreSchedulerCounters", "store/store_scheduler.h", ""),
        ("LedgerCounters", "job/job_ledger.h", "ledger."),
        ("StoreWorkerCounters", "store/store_worker.h", ""),
        ("StoreGroupCounters", "store/store_worker.h", ""),
    ],
)
def test_every_counter_is_told(struct: str, header: str, prefix: str) -> None:
    text = re.sub(r"//[^\n]*", "", (ROOT / "cpp/include/kvprism" / header).read_text("utf-8"))
    body = text.split(f"struct {struct} {{", 1)[1].split("\n};", 1)[0]
    names = re.findall(r"std::uint64_t (\w+)", body)
    assert len(names) > 6
    missing = [name for name in names if f'"{prefix}{name}"' not in COUNTERS]
    assert missing == [], "cpp/src/c_api/counters.cpp tells the C interface's callers"
