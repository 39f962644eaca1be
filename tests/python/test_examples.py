"""The Python examples run as they are."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kvprism.local_mooncake import LocalMooncake

ENGINE = Path(__file__).parents[2] / "build" / "release" / "bin" / "kvprism_engine"
EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


@pytest.mark.parametrize(
    ("name", "last_line"),
    [("quickstart.py", "48 tokens came from the store, byte for byte")],
)
def test_example(name: str, last_line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == last_line
    assert done.stderr == ""


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"quickstart.py"}


def run_engine(*arguments: str, engine: Path = ENGINE) -> subprocess.CompletedProcess[str]:
    # The library is looked for beside the python3 in PATH, as an engine without Python would.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    quiet = {"MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "ERROR", "PATH": path}
    return subprocess.run(
        [str(engine), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **quiet},
    )


@pytest.mark.mooncake
def test_the_engine_without_python_stores_in_mooncake() -> None:
    with LocalMooncake(storage_bytes=64 << 20) as mooncake:
        done = run_engine(mooncake.master)
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = done.stdout.splitlines()
    # How much the first engine found depends on how fast its saves were.
    assert first.startswith("tokens from the store: 0 ")
    assert first.endswith(" 192 192 192")
    assert last == "0 bytes wrong"


@pytest.mark.mooncake
def test_the_engine_in_c_stores_in_mooncake() -> None:
    with LocalMooncake(storage_bytes=64 << 20) as mooncake:
        done = run_engine(mooncake.master, engine=ENGINE.parent / "c_life_test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "c engine: loaded what it had saved\n"


def test_the_engine_says_what_is_wrong() -> None:
    done = run_engine("127.0.0.1:1")
    assert done.returncode == 2
    assert done.stderr.startswith("engine: Mooncake client: master = 127.0.0.1:1: expected a")


def test_the_engine_says_which_libpython_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake's library is a Python extension: an engine without Python needs a libpython."""
    monkeypatch.setenv("KVPRISM_LIBPYTHON", "/nowhere/libpython3.11.so.1.0")
    with socket.create_server(("127.0.0.1", 0)) as master:
        done = run_engine(f"127.0.0.1:{master.getsockname()[1]}")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "engine: Mooncake library: python_library = /nowhere/libpython3.11.so.1.0: expected a "
        "libpython for tag 'cp3"
    ), done.stderr
    assert "KVPRISM_LIBPYTHON; on Debian install libpython3.x" in done.stderr
