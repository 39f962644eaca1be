"""The check of a wheel's contents finds what is missing and what does not belong."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILT = [
    "kvprism/_core.cpython-311-x86_64-linux-gnu.so",
    "kvprism/_core.pyi",
    "kvprism/lib/libkvprism.so",
    "kvprism/lib/libkvprism_hash.so",
    "kvprism/lib/kvprism-mooncake-probe",
    *(
        f"kvprism/lib/cmake/kvprism/kvprism{name}.cmake"
        for name in ("ConfigVersion", "Config", "Targets", "HashTargets")
    ),
    "kvprism/include/kvprism/base/version.h",
    "kvprism-0.1.0.dist-info/licenses/LICENSE",
]
ENTRY_POINTS = """[cmake.prefix]
kvprism = kvprism

[console_scripts]
kvprism = kvprism.cli:main

[vllm.general_plugins]
kvprism = kvprism.vllm.plugin:register
"""


def contents() -> dict[str, str]:
    names = [*BUILT]
    python = ROOT / "python"
    for path in python.rglob("*"):
        if path.suffix in (".py", ".json", ".typed"):
            names.append(path.relative_to(python).as_posix())
    include = ROOT / "cpp/include"
    for path in include.rglob("*.h"):
        if path.parent.name != "sim":
            names.append(f"kvprism/include/{path.relative_to(include).as_posix()}")
    return {**dict.fromkeys(names, ""), "kvprism-0.1.0.dist-info/entry_points.txt": ENTRY_POINTS}


def check(folder: Path, files: dict[str, str]) -> tuple[int, list[str]]:
    wheel = folder / "kvprism.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o755 if name.endswith("-probe") else 0o644) << 16
            archive.writestr(info, text)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/check_wheel.py"), str(wheel)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout.splitlines()


def test_a_whole_wheel_is_complete(tmp_path: Path) -> None:
    code, lines = check(tmp_path, contents())
    assert code == 0, lines
    assert len(lines) == 1
    assert lines[0].endswith("files, complete")


def test_all_that_is_wrong_is_named(tmp_path: Path) -> None:
    files = contents()
    del files["kvprism/vllm/worker_side.py"]
    del files["kvprism/include/kvprism/store/store_worker.h"]
    del files["kvprism/lib/libkvprism_hash.so"]
    entry_points = "kvprism-0.1.0.dist-info/entry_points.txt"
    files[entry_points] = files[entry_points].replace("kvprism = kvprism\n", "")
    files["kvprism/include/kvprism/sim/world.h"] = ""
    files["numpy/core.py"] = ""
    code, lines = check(tmp_path, files)
    assert code == 1
    assert lines == [
        "entry_points.txt: [cmake.prefix] lacks 'kvprism = kvprism'",
        "kvprism/include/kvprism/store/store_worker.h: not in the wheel",
        "kvprism/vllm/worker_side.py: not in the wheel",
        r"kvprism/lib/libkvprism_hash\.so: 0 files, expected 1",
        "kvprism/include/kvprism/sim/world.h: does not belong in the wheel",
        "numpy/core.py: does not belong in the wheel",
    ]
