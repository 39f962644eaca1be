"""Finds the installed Mooncake and reads facts of its store library without loading it."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ._core import known_mooncake_builds

# "mooncake/store.so" and, in later versions, "mooncake/_store.cpython-311-x86_64-linux-gnu.so".
_STORE_LIBRARY = re.compile(r"mooncake/(store|_store\.cpython-[^/]*)\.so")

# Which Debian package brings a library that the wheels leave to the machine.
SYSTEM_PACKAGES = {
    "libcurl.so.4": "libcurl4",
    "libibverbs.so.1": "libibverbs1",
    "libmlx5.so.1": "ibverbs-providers",
    "libnuma.so.1": "libnuma1",
}


@dataclass(frozen=True)
class InstalledMooncake:
    """An installed Mooncake distribution with a store library."""

    distribution: str
    """Its name as in its metadata, e.g. ``mooncake-transfer-engine-non-cuda``; empty for a library
    that no distribution lists."""
    version: str
    python_tag: str
    """Which Python it was built for, e.g. ``cp311``; empty when its metadata do not say."""
    library: Path
    """The store library."""
    build_id: str
    """Its GNU build-id in hex; empty when it has none."""
    needed: tuple[str, ...]
    """Names of the libraries that it asks the loader for."""

    @property
    def name(self) -> str:
        """The distribution and its version; of a library of none, that."""
        return f"{self.distribution} {self.version}" if self.distribution else "a library by itself"

    @property
    def folder(self) -> Path:
        """The package's folder, which also holds the server programs."""
        return self.library.parent

    def program(self, name: str) -> Path:
        """Path of a program of the wheel, made executable if it is not.

        Args:
            name: ``mooncake_master`` or ``mooncake_client``.

        Raises:
            FileNotFoundError: The wheel has no such program.
        """
        path = self.folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{self.distribution} {self.version} has no {name}: {path}")
        if not os.access(path, os.X_OK):
            path.chmod(path.stat().st_mode | 0o755)
        return path


def python_tag() -> str:
    """The tag of wheels for this interpreter, e.g. ``cp311``."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def installed_mooncakes(path: Sequence[str] | None = None) -> Iterator[InstalledMooncake]:
    """Every installed distribution whose file list has a store library.

    Args:
        path: Folders to search; ``sys.path`` when None.
    """
    where = list(sys.path if path is None else path)
    for distribution in metadata.distributions(path=where):
        name = distribution.metadata["Name"] or ""
        if "mooncake" not in name:
            continue
        for file in distribution.files or ():
            if not _STORE_LIBRARY.fullmatch(file.as_posix()):
                continue
            library = Path(str(distribution.locate_file(file))).resolve()
            build_id, needed = read_library(library)
            wheel = distribution.read_text("WHEEL") or ""
            tag = re.search(r"^Tag: ([^-\n]+)-", wheel, re.MULTILINE)
            yield InstalledMooncake(
                distribution=name,
                version=distribution.version,
                python_tag=tag.group(1) if tag else "",
                library=library,
                build_id=build_id,
                needed=needed,
            )


def find_installed_mooncake(path: Sequence[str] | None = None) -> InstalledMooncake | None:
    """The first installed distribution with a store library, or None.

    Args:
        path: Folders to search; ``sys.path`` when None.
    """
    return next(installed_mooncakes(path), None)


def describe_library(library: Path, path: Sequence[str] | None = None) -> InstalledMooncake:
    """The installed distribution that lists a store library, or what the file itself tells.

    pip lets a second distribution overwrite the file of another: of several that list it, the one
    whose build it is.

    Args:
        library: The store library.
        path: Folders to search; ``sys.path`` when None.
    """
    library = library.resolve()
    listed = [found for found in installed_mooncakes(path) if found.library == library]
    rows = {(row.distribution, row.version, row.build_id) for row in known_mooncake_builds()}
    for found in listed:
        if (found.distribution, found.version, found.build_id) in rows:
            return found
    if listed:
        return min(listed, key=lambda found: found.distribution)
    build_id, needed = read_library(library)
    return InstalledMooncake("", "", "", library, build_id, needed)


def read_library(path: Path) -> tuple[str, tuple[str, ...]]:
    """Build-id and needed libraries of a 64-bit ELF file; empty for anything else."""
    try:
        data = path.read_bytes()
        return _build_id(data), _needed(data)
    except (OSError, struct.error, ValueError):
        return "", ()


def find_system_library(name: str) -> str | None:
    """Where the loader would find a library, or None.

    Args:
        name: As in the list of needed libraries, e.g. ``libnuma.so.1``.
    """
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for folder in (*folders, "/lib64", "/usr/lib64", "/lib", "/usr/lib"):
        candidate = Path(folder) / name
        if candidate.exists():
            return str(candidate)
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        listing = subprocess.run(
            [ldconfig, "-p"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    for line in listing.splitlines():
        if line.strip().startswith(name + " "):
            return line.rpartition("=> ")[2]
    return None


def missing_libraries(installed: InstalledMooncake) -> tuple[str, ...]:
    """Needed libraries that neither the wheel nor the machine has."""
    own = {file.name for file in installed.folder.glob("*.so*")}
    for folder in installed.folder.parent.glob("mooncake*.libs"):
        own.update(file.name for file in folder.iterdir())
    return tuple(
        name for name in installed.needed if name not in own and find_system_library(name) is None
    )


_PT_LOAD, _PT_DYNAMIC, _PT_NOTE = 1, 2, 4
_DT_NEEDED, _DT_STRTAB = 1, 5
_NT_GNU_BUILD_ID = 3


def _segments(data: bytes) -> list[tuple[int, int, int, int]]:
    """Kind, offset in the file, address and size in the file of every segment."""
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    result = []
    for i in range(count):
        kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", data, table + i * size)
        result.append((kind, offset, address, length))
    return result


def _build_id(data: bytes) -> str:
    for kind, offset, _, length in _segments(data):
        at, end = offset, offset + length
        while kind == _PT_NOTE and at + 12 <= end:
            name_size, body_size, note = struct.unpack_from("<III", data, at)
            name = data[at + 12 : at + 12 + name_size]
            body = at + 12 + (name_size + 3) // 4 * 4
            if note == _NT_GNU_BUILD_ID and name == b"GNU\0":
                return data[body : body + body_size].hex()
            at = body + (body_size + 3) // 4 * 4
    return ""


def _needed(data: bytes) -> tuple[str, ...]:
    segments = _segments(data)
    names: list[int] = []
    strings = 0
    for kind, offset, _, length in segments:
        if kind != _PT_DYNAMIC:
            continue
        for at in range(offset, offset + length, 16):
            tag, value = struct.unpack_from("<qQ", data, at)
            if tag == _DT_NEEDED:
                names.append(value)
            elif tag == _DT_STRTAB:
                strings = value
    for kind, offset, address, length in segments:
        if kind == _PT_LOAD and address <= strings < address + length:
            base = offset + strings - address
            return tuple(
                data[base + name : data.index(b"\0", base + name)].decode() for name in names
            )
    return ()
