"""Where the CMake package of an installed kvprism is found, and the one version it has."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import kvprism

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "lib/cmake/kvprism/kvprismConfig.cmake"


def test_the_command_prints_the_folder_of_the_cmake_package() -> None:
    command = [sys.executable, "-m", "kvprism", "--cmake-dir"]
    printed = Path(subprocess.check_output(command, text=True).strip())
    assert (printed / "kvprismConfig.cmake").is_file()
    assert (printed / "kvprismTargets.cmake").is_file()


def test_other_builds_find_it_by_entry_point() -> None:
    """scikit-build-core adds the folders of these modules to CMAKE_PREFIX_PATH."""
    (entry,) = importlib.metadata.entry_points(group="cmake.prefix", name="kvprism")
    folders = [Path(folder) for folder in importlib.import_module(entry.value).__path__]
    assert any((folder / CONFIG).is_file() for folder in folders), folders


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[=<>]", requirement)[0] for requirement in requirements}


def test_what_the_tests_need_is_told_alike_everywhere() -> None:
    """numpy is a dependency of the package itself."""
    lines = (ROOT / "scripts/requirements-test.txt").read_text("utf-8").split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    (numpy,) = project["project"]["dependencies"]
    extra = project["project"]["optional-dependencies"]["test"]
    assert names([numpy, *extra]) == names(lines)
    assert project["dependency-groups"]["test"] == extra
    (mooncake,) = project["project"]["optional-dependencies"]["mooncake"]
    assert mooncake in extra
    assert mooncake in lines


def test_one_version() -> None:
    match = re.search(
        r"VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text("utf-8").split("kvprism", 1)[1]
    )
    assert match is not None
    version = match[1]
    assert kvprism.__version__ == version
    assert importlib.metadata.version("kvprism") == version
    folder = next(Path(p) for p in kvprism.__path__ if (Path(p) / CONFIG).is_file())
    library = ctypes.CDLL(str(folder / "lib/libkvprism.so"))
    library.kvprism_version.restype = ctypes.c_char_p
    assert library.kvprism_version().decode() == version
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def chosen_python(folder: Path, **environment: str) -> str:
    """What setup.sh finds with this folder in front; "" when nothing will do."""
    script = (ROOT / "scripts/setup.sh").read_text("utf-8")
    function = script[script.index("find_python() {") : script.index("\n}\n") + 3]
    done = subprocess.run(
        ["bash", "-c", function + "find_python"],
        env={"PATH": f"{folder}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.strip()


def test_set_up_chooses_a_python_that_the_pinned_mooncake_has_a_wheel_for(tmp_path: Path) -> None:
    (pinned,) = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]["mooncake"]
    minors = {
        int(row.python_tag.removeprefix("cp3"))
        for row in kvprism.known_mooncake_builds()
        if f"{row.distribution}=={row.version}" == pinned
    }
    assert minors == {10, 11, 12, 13}
    for minor in range(10, 16):
        named = tmp_path / str(minor) / f"python3.{minor}"
        named.parent.mkdir()
        # This interpreter, with its headers, which says that it is another.
        named.write_text(
            f"#!/bin/sh\nexec {sys.executable} -c 'import sys, sysconfig\n"
            f'sys.version_info, sys._base_executable = (3, {minor}, 0), "named"\n'
            "exec(sys.stdin.read())'\n"
        )
        named.chmod(0o755)
        fits = minor in minors and minor >= 11
        found = chosen_python(tmp_path / "none", KVPRISM_PYTHON=str(named))
        assert found == ("named" if fits else ""), minor
        assert (chosen_python(named.parent) == "named") == fits, minor
