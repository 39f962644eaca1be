"""What holds for every command: no traceback, whatever happens to its streams or its process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

KVPRISM = [sys.executable, "-m", "kvprism"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written(unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*KVPRISM, "doctor"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "kvprism doctor: No space left on device\n"


def test_output_that_is_closed() -> None:
    script = f"'{sys.executable}' -m kvprism doctor >&-"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "kvprism doctor: standard output is closed\n"


@pytest.mark.parametrize("command", [["inspect"], ["replay"], ["replay", "--config"]])
def test_names_that_are_not_utf8(command: list[str], tmp_path: Path) -> None:
    arguments = [*command, os.fsencode(tmp_path) + b"/a\xff"]
    if command[-1] == "--config":
        trace = tmp_path / "trace.jsonl"
        trace.write_text('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}')
        arguments.append(str(trace))
    done = subprocess.run([*KVPRISM, *arguments], capture_output=True, check=False)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert b"expected a" in done.stderr


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                child = int(stat.parent.name)
                found |= {child} | descendants(child)
    return found


def runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.mooncake
@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_signal_leaves_no_process_behind(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    demo = subprocess.Popen(
        [*KVPRISM, "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        text=True,
    )
    # The master, the storage process and an engine.
    children: set[int] = set()
    end = time.monotonic() + 30
    while len(children) < 3 and time.monotonic() < end and demo.poll() is None:
        time.sleep(0.02)
        children = descendants(demo.pid)
    assert len(children) >= 3
    demo.send_signal(number)
    _, error = demo.communicate(timeout=30)
    assert demo.returncode == status
    assert error == ""
    end = time.monotonic() + 5
    while any(map(runs, children)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(runs, children))
    if number != signal.SIGKILL:
        assert not list(tmp_path.glob("kvprism-mooncake-*"))
