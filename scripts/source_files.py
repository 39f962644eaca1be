"""Names of the project's own files, also where there is no git, as in an sdist."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_NOT_OURS = {".git", ".venv", ".venv-vllm", "build", "dist", "__pycache__"}


def source_files() -> set[str]:
    """Paths below ROOT with slashes: what git keeps or would keep, else what lies there."""
    if git := shutil.which("git"):
        listed = subprocess.run(
            [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if listed.returncode == 0:
            names = {name for name in listed.stdout.split("\0") if name}
            return {name for name in names if (ROOT / name).is_file()}
    below = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return {
        path.as_posix()
        for path in below
        if path.name != "_core.pyi" or "reference" in path.parts  # the built stub
        if not _NOT_OURS.intersection(path.parts)
    }
