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
