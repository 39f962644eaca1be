#!/usr/bin/env python3
"""check_wheel.py WHEEL: does the wheel hold what C++ and Python users need, each once?"""

from __future__ import annotations

import configparser
import re
import sys
import zipfile

from source_files import source_files

# What is built, and what says how to find it; the sources' own files come from the sources.
REQUIRED = (
    r"kvprism/_core\.[^/]*\.so",
    r"kvprism/_core\.pyi",
    r"kvprism/lib/libkvprism\.so",
    r"kvprism/lib/libkvprism_hash\.so",
    r"kvprism/lib/kvprism-mooncake-probe",
    r"kvprism/lib/cmake/kvprism/kvprismConfigVersion\.cmake",
    r"kvprism/lib/cmake/kvprism/kvprismConfig\.cmake",
    r"kvprism/lib/cmake/kvprism/kvprismTargets\.cmake",
    r"kvprism/lib/cmake/kvprism/kvprismHashTargets\.cmake",
    r"kvprism/include/kvprism/base/version\.h",
    r"kvprism-[^/]*\.dist-info/entry_points\.txt",
    r"kvprism-[^/]*\.dist-info/licenses/LICENSE",
)
FORBIDDEN = (
    r"kvprism/include/kvprism/sim/.*",
    r"kvprism/include/(?!kvprism/).*",
    r"kvprism/lib/libkvprism(_hash)?\.so\..*",
    r".*\.(a|o|cpp)",
    r"(?!kvprism[/-]).*",
)
# Sections of entry_points.txt: programs, vLLM's plugins, and where CMake looks for packages.
ENTRY_POINTS = {
    "console_scripts": "kvprism = kvprism.cli:main",
    "vllm.general_plugins": "kvprism = kvprism.vllm.plugin:register",
    "cmake.prefix": "kvprism = kvprism",
}


def of_the_sources() -> set[str]:
    """Every module and every header that users include."""
    files = source_files()
    modules = {
        name.removeprefix("python/")
        for name in files
        if name.startswith("python/") and name.endswith((".py", ".json", "/py.typed"))
    }
    headers = {
        "kvprism/include/" + name.removeprefix("cpp/include/")
        for name in files
        if name.startswith("cpp/include/kvprism/") and "/sim/" not in name
    }
    return modules | headers


def entry_point_problems(text: str) -> list[str]:
    found = configparser.ConfigParser(delimiters=("\0",), allow_no_value=True)
    found.read_string(text)
    return [
        f"entry_points.txt: [{section}] lacks '{line}'"
        for section, line in ENTRY_POINTS.items()
        if not found.has_section(section) or line not in found[section]
    ]


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__)
        return 2
    with zipfile.ZipFile(arguments[0]) as wheel:
        names = wheel.namelist()
        executable = {
            info.filename for info in wheel.infolist() if (info.external_attr >> 16) & 0o111
        }
        texts = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
        problems = entry_point_problems(wheel.read(texts[0]).decode() if texts else "")
    problems += [f"{name}: not in the wheel" for name in sorted(of_the_sources() - set(names))]
    for pattern in REQUIRED:
        count = sum(re.fullmatch(pattern, name) is not None for name in names)
        if count != 1:
            problems.append(f"{pattern}: {count} files, expected 1")
    for name in names:
        if any(re.fullmatch(pattern, name) for pattern in FORBIDDEN):
            problems.append(f"{name}: does not belong in the wheel")
        if name.endswith("-probe") and name not in executable:
            problems.append(f"{name}: not executable")
    if len(names) != len(set(names)):
        problems.append("some names occur twice")
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{arguments[0]}: {len(names)} files, complete")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
