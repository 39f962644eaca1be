#!/usr/bin/env python3
"""release_check.py WORK SDIST WHEEL: is one version everywhere, and is the sdist whole?

Prints one line per problem; the exit status is 1 if there is any. WORK holds a virtual environment
in `venv` with the wheel installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from source_files import ROOT, source_files

# A build from the sdist needs these, and a user who reads it expects them.
SDIST_FOLDERS = (
    "bindings",
    "cmake",
    "cpp",
    "examples",
    "python",
    "scripts",
    "tests",
    "third_party",
)
SDIST_FILES = ("CMakeLists.txt", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")
SDIST_FORBIDDEN = re.compile(r"\.(so|o|a|pyc|whl)$|(^|/)(build|\.venv[^/]*|__pycache__|\.ci)/")


def metadata_version(text: str) -> str:
    return HeaderParser().parsestr(text)["Version"]


def output(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else f"failed: {done.stderr.strip()}"


def versions(python: Path, sdist: Path, wheel: Path) -> dict[str, str]:
    """Every place that tells the version."""
    found = {}
    with tarfile.open(sdist) as archive:
        stem = sdist.name.removesuffix(".tar.gz")
        info = archive.extractfile(f"{stem}/PKG-INFO")
        assert info is not None
        found["PKG-INFO of the sdist"] = metadata_version(info.read().decode())
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            text = files.read(name).decode() if name.endswith(("METADATA", ".cmake", ".h")) else ""
            if name.endswith(".dist-info/METADATA"):
                found["METADATA of the wheel"] = metadata_version(text)
            elif name.endswith("kvprismConfigVersion.cmake"):
                match = re.search(r'set\(PACKAGE_VERSION "([^"]+)"\)', text)
                found["kvprismConfigVersion.cmake"] = match[1] if match else "none"
            elif name.endswith("base/version.h"):
                match = re.search(r'KVPRISM_VERSION_STRING "([^"]+)"', text)
                found["version.h"] = match[1] if match else "none"
    found["name of the sdist"] = sdist.name.removesuffix(".tar.gz").split("-")[1]
    found["name of the wheel"] = wheel.name.split("-")[1]
    found["kvprism.__version__"] = output(
        python, "-c", "import kvprism; print(kvprism.__version__)"
    )
    found["kvprism --version"] = output(python.parent / "kvprism", "--version").split()[-1]
    script = (
        "import ctypes, kvprism.cli as cli;"
        "library = ctypes.CDLL(str(cli.cmake_dir().parents[1] / 'libkvprism.so'));"
        "library.kvprism_version.restype = ctypes.c_char_p;"
        "print(library.kvprism_version().decode())"
    )
    found["kvprism_version()"] = output(python, "-c", script)
    return found


def check_sdist(sdist: Path) -> list[str]:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    problems = [f"{name}: not in the sdist" for name in SDIST_FILES if name not in names]
    problems += [
        f"{name}: not in the sdist"
        for name in sorted(source_files())
        if name.split("/")[0] in SDIST_FOLDERS and name not in names
    ]
    problems += [
        f"{name}: does not belong in the sdist" for name in names if SDIST_FORBIDDEN.search(name)
    ]
    return problems


def main(arguments: list[str]) -> int:
    if len(arguments) != 3:
        print(__doc__)
        return 2
    work, sdist, wheel = (Path(argument) for argument in arguments)
    match = re.search(
        r"project\(\s*kvprism\s+VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()
    )
    assert match is not None
    version = match[1]
    told = versions(work / "venv/bin/python", sdist, wheel)
    problems = [
        f"{place}: {found}, expected {version}" for place, found in told.items() if found != version
    ]
    if f"\n## [{version}]" not in (ROOT / "CHANGELOG.md").read_text("utf-8"):
        problems.append(f"CHANGELOG.md: no section [{version}]")
    problems += check_sdist(sdist)
    for problem in problems:
        print(problem)
    if not problems:
        print(f"version {version} in {len(told)} places and the changelog; the sdist is whole")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
