"""The check of the library's symbols finds what it is there to find."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = "0000000000001000 T kvprism::Projection::make()\n0000000000002000 T kvprism_version\n"
HARMLESS = " U snprintf@GLIBC_2.2.5\n U std::terminate()@GLIBCXX_3.4\n"


def check(folder: Path, exported: str, used: str) -> subprocess.CompletedProcess[str]:
    """Runs the check over what an `nm` of this folder prints."""
    (folder / "defined").write_text(exported)
    (folder / "undefined").write_text(used)
    header = folder / "kvprism.h"
    header.write_text("KVPRISM_API const char* kvprism_version(void);\n")
    nm = folder / "nm"
    nm.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        f'  *--undefined-only*) cat "{folder}/undefined" ;;\n  *) cat "{folder}/defined" ;;\nesac\n'
    )
    nm.chmod(0o755)
    cmake = shutil.which("cmake")
    assert cmake is not None
    script = str(ROOT / "cmake/CheckSymbols.cmake")
    return subprocess.run(
        [cmake, f"-DNM={nm}", "-DLIBRARY=any", f"-DHEADER={header}", "-P", script],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_what_is_allowed_passes(tmp_path: Path) -> None:
    done = check(tmp_path, OURS, HARMLESS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("exported", "named"),
    [
        ("0000000000001000 T fmt::v9::vformat()\n", "fmt::v9::vformat()"),
        ("0000000000001000 T kvprism_hidden\n", "kvprism_hidden"),
        ("", "kvprism_version"),
    ],
    ids=["foreign", "undeclared", "missing"],
)
def test_exports_that_do_not_belong_are_named(tmp_path: Path, exported: str, named: str) -> None:
    done = check(tmp_path, exported if not exported else OURS + exported, HARMLESS)
    assert done.returncode == 1
    assert named in done.stderr


def test_printing_and_ending_is_named(tmp_path: Path) -> None:
    printing = ["std::cout@GLIBCXX_3.4", "std::cerr@GLIBCXX_3.4", "std::clog@GLIBCXX_3.4"]
    printing += ["stdout@GLIBC_2.2.5", "stderr@GLIBC_2.2.5", "printf@GLIBC_2.2.5"]
    printing += ["fprintf@GLIBC_2.2.5", "dprintf@GLIBC_2.2.5", "vfprintf@GLIBC_2.2.5"]
    printing += ["__printf_chk@GLIBC_2.3.4", "__fprintf_chk@GLIBC_2.3.4", "puts@GLIBC_2.2.5"]
    printing += ["fputs@GLIBC_2.2.5", "fputc@GLIBC_2.2.5", "putc@GLIBC_2.2.5"]
    printing += ["putchar@GLIBC_2.2.5", "fwrite@GLIBC_2.2.5", "perror@GLIBC_2.2.5"]
    ending = ["abort@GLIBC_2.2.5", "exit@GLIBC_2.2.5", "_Exit@GLIBC_2.2.5"]
    ending += ["quick_exit@GLIBC_2.10", "raise@GLIBC_2.2.5"]
    every = [*printing, *ending]
    used = "".join(f" U {symbol}\n" for symbol in every)
    done = check(tmp_path, OURS, used + HARMLESS)
    assert done.returncode == 1
    assert [symbol for symbol in every if symbol not in done.stderr] == []
    assert "snprintf" not in done.stderr
