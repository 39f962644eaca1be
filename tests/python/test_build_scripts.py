"""What `make` runs first: it works beside others, and goes on after an end in the middle."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMON = ROOT / "scripts" / "common.sh"


def bash(text: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in which what lies in `folder` is found first."""
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        ["bash", "-c", text],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(0o755)


INSTALL = f". {COMMON}; sleep() {{ :; }}; APT_WAIT_SECONDS=20; install_packages one two"


def test_a_package_manager_that_is_busy_is_waited_for(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    program(
        tmp_path / "apt-get",
        f"""echo "$*" >>{calls}
case "$1 $(wc -l <{calls})" in
  "update 1" | "update 2") echo "E: Could not get lock /var/lib/apt/lists/lock" >&2; exit 100 ;;
esac
""",
    )
    done = bash(INSTALL, tmp_path)
    assert done.returncode == 0, done.stderr
    *updates, install = calls.read_text().splitlines()
    assert updates == ["update -qq"] * 3
    assert install.endswith("-o DPkg::Lock::Timeout=20 one two")


def test_packages_that_cannot_be_had_are_told_at_once(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    program(tmp_path / "apt-get", f'echo "$*" >>{calls}\necho "E: no network" >&2\nexit 100\n')
    done = bash(INSTALL, tmp_path)
    assert done.returncode == 1
    assert done.stdout == "E: no network\n"
    assert calls.read_text() == "update -qq\n"


def test_the_root_is_found_whatever_cdpath_says(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for path in (".", str(tmp_path)):
        done = bash(f'cd {ROOT}; . scripts/common.sh; printf %s "$ROOT"', tmp_path, CDPATH=path)
        assert done.stdout == str(ROOT)


# Stands for the interpreter that is found and for the one of .venv; `pip install -e` fails where
# the test says so.
PYTHON = """here="$(cd "$(dirname "$0")" && pwd)"
case "$*" in
  -) echo "$here/python" ;;
  -V) echo "Python 3.11.0" ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  *" -e .")
    echo "install" >>"$CALLS"
    [ ! -e "$CALLS.fail" ] || exit 1
    mkdir -p build/release; touch build/release/build.ninja ;;
esac
"""


def test_a_set_up_that_was_broken_off_is_done_again(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "scripts").mkdir(parents=True)
    for path in (COMMON, ROOT / "scripts" / "setup.sh", *ROOT.glob("scripts/requirements-*.txt")):
        shutil.copy(path, project / "scripts")
    for name in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, project)
    programs = tmp_path / "bin"
    programs.mkdir()
    program(programs / "python", PYTHON)
    calls = tmp_path / "calls"
    fail = tmp_path / "calls.fail"

    def set_up(werror: str) -> int:
        """How often it has installed so far."""
        bash(
            f"bash {project}/scripts/setup.sh",
            programs,
            KVPRISM_PYTHON=str(programs / "python"),
            KVPRISM_WERROR=werror,
            CALLS=str(calls),
        )
        return len(calls.read_text().splitlines())

    assert set_up("OFF") == 1
    assert set_up("OFF") == 1
    fail.touch()
    assert set_up("ON") == 2
    fail.unlink()
    # What was uninstalled for the other build is not there.
    assert set_up("OFF") == 3
    assert set_up("OFF") == 3
