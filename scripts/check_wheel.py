#!/usr/bin/env python3
"""check_wheel.py WHEEL: does the wheel hold what C++ and Python users need, each once?"""

from __future__ import annotations

import re
import sys
import zipfile

REQUIRED = (
    r"kvprism/__init__\.py",
    r"kvprism/py\.typed",
    r"kvprism/cache_config\.schema\.json",
    r"kvprism/_core\.[^/]*\.so",
    r"kvprism/_core\.pyi",
    r"kvprism/hash\.py",
    r"kvprism/vllm/connector\.py",
    r"kvprism/lib/libkvprism\.so",
    r"kvprism/lib/libkvprism_hash\.so",
    r"kvprism/lib/kvprism-mooncake-probe",
    r"kvprism/lib/cmake/kvprism/kvprismConfigVersion\.cmake",
    r"kvprism/lib/cmake/kvprism/kvprismConfig\.cmake",
    r"kvprism/lib/cmake/kvprism/kvprismTargets\.cmake",
    r"kvprism/include/kvprism/base/version\.h",
    r"kvprism/include/kvprism/base/error\.h",
    r"kvprism/include/kvprism/hash/block_hasher\.h",
    r"kvprism/include/kvprism/kvprism\.h",
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


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__)
        return 2
    with zipfile.ZipFile(arguments[0]) as wheel:
        names = wheel.namelist()
        executable = {
            info.filename for info in wheel.infolist() if (info.external_attr >> 16) & 0o111
        }
    problems = []
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
