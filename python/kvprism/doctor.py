"""Says what a Mooncake store needs from this machine, what is missing, and how to get it.

Facts are recorded once; judgements are pure functions of them, so that every broken set-up can be
written down as a test.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import urllib.parse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from . import mooncake_wheel
from ._core import Error, Problem, RdmaFacts, find_mooncake_library, known_mooncake_builds
from .local_mooncake import LocalMooncake, LocalMooncakeError
from .mooncake_wheel import SYSTEM_PACKAGES, InstalledMooncake

Level = Literal["ok", "note", "problem"]

_MASTER_TIMEOUT = 2.0
_PROBE_TIMEOUT = 200.0
_INSTALL = "pip install mooncake-transfer-engine-non-cuda==0.3.13.post1"
_CUDA_LIBRARIES = ("libcuda.so", "libcudart.so")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    subject: str
    """What was looked at, e.g. ``system libraries``."""
    message: str
    """What was found."""
    hint: str = ""
    """What to do; only with problems and notes."""

    def __str__(self) -> str:
        mark = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}[self.level]
        hint = f"\n{'':32}-> {self.hint}" if self.hint else ""
        return f"{mark}  {self.subject:<21}  {self.message}{hint}"


@dataclass(frozen=True)
class KnownBuild:
    """A build of Mooncake whose binary interface is known."""

    distribution: str
    version: str
    python_tag: str
    build_id: str
    exercised: bool = True


@dataclass(frozen=True)
class Facts:
    """What there is to know about this machine."""

    installed: InstalledMooncake | None = None
    """Of the library that the engine would open."""
    not_found: Problem | None = None
    """Why there is none."""
    known_builds: tuple[KnownBuild, ...] = ()
    missing_libraries: tuple[str, ...] = ()
    python_tag: str = ""
    rdma: RdmaFacts = field(default_factory=RdmaFacts)
    taken_ports: tuple[int, ...] = ()
    master_failure: str | None = None
    """Why the master cannot be reached; None when it can, or when nobody asked."""
    probe_verdict: str | None = None
    """The probe's line; None when it was not run."""


@dataclass(frozen=True)
class Wanted:
    """What the store is to be used with."""

    protocol: str = "tcp"
    rdma_devices: tuple[str, ...] = ()
    master: str = ""
    ports: tuple[int, ...] = ()
    locked_bytes: int = 0
    """Bytes of cache and segments that RDMA must lock; 0 when not known."""


def check_installation(facts: Facts) -> Finding:
    """Is there a Mooncake?"""
    installed = facts.installed
    if installed is None:
        if facts.not_found is None:
            return Finding("problem", "Mooncake", "not installed", _INSTALL)
        return _problem("Mooncake", facts.not_found)
    text = f"{installed.name}, {installed.library}"
    if installed.python_tag and facts.python_tag and installed.python_tag != facts.python_tag:
        return Finding(
            "problem",
            "Mooncake",
            f"{text}, is for {installed.python_tag}, and this Python is {facts.python_tag}",
            "install it again with this Python's pip",
        )
    return Finding("ok", "Mooncake", text)


def check_build(facts: Facts) -> Finding | None:
    """Is it a build that we know?"""
    installed = facts.installed
    if installed is None:
        return None
    hint = "install a known version, or run `kvprism doctor --probe` and set unknown_build to probe"
    for row in facts.known_builds:
        if row.build_id != installed.build_id:
            continue
        if not installed.distribution or (row.distribution, row.version) == (
            installed.distribution,
            installed.version,
        ):
            how = "exercised by our tests" if row.exercised else "compared, not exercised"
            return Finding("ok", "build", f"{installed.build_id}, known ({how})")
        hint = (
            f"its file is that of {row.distribution} {row.version}, which has overwritten it: "
            "uninstall both, then install one of them"
        )
    known = sorted({f"{row.distribution} {row.version}" for row in facts.known_builds})
    return Finding(
        "problem",
        "build",
        f"{installed.name} with build-id "
        f"{installed.build_id or '(none)'} is not known; known are {', '.join(known) or 'none'}",
        hint,
    )


def check_libraries(facts: Facts) -> Finding | None:
    """Are the system's libraries there?"""
    if facts.installed is None:
        return None
    if not facts.missing_libraries:
        return Finding("ok", "system libraries", "all present")
    packages = [
        SYSTEM_PACKAGES[name] for name in facts.missing_libraries if name in SYSTEM_PACKAGES
    ]
    hints = []
    if packages:
        hints.append(f"apt-get install {' '.join(packages)}")
    if any(name.startswith(_CUDA_LIBRARIES) for name in facts.missing_libraries):
        hints.append(
            "CUDA of that version is needed; without an NVIDIA GPU use "
            "mooncake-transfer-engine-non-cuda"
        )
    return Finding(
        "problem",
        "system libraries",
        f"missing: {', '.join(facts.missing_libraries)}",
        "; ".join(hints) or "install the packages that have them",
    )


def _problem(subject: str, problem: Problem) -> Finding:
    """What the library would say, and end the engine's start with."""
    return Finding(
        "problem",
        subject,
        f"{problem.path} = {problem.value}: expected {problem.expected}",
        problem.hint,
    )


_MEMORY_LOCK = "memory lock"


def check_rdma(facts: Facts, wanted: Wanted) -> list[Finding]:
    """May the protocol be used (R67, R68): devices, ports, memory to lock, the environment?"""
    rdma = facts.rdma
    present = ", ".join(rdma.devices)
    if wanted.protocol != "rdma":
        text = present or f"none in {rdma.folder}; not needed for {wanted.protocol}"
        return [Finding("note", "RDMA devices", text)]
    found = [
        _problem(_rdma_subject(problem), problem)
        for problem in rdma.problems(
            rdma_devices=wanted.rdma_devices, locked_bytes=wanted.locked_bytes
        )
    ]
    subjects = [finding.subject for finding in found]
    if "RDMA devices" not in subjects:
        found.insert(0, Finding("ok", "RDMA devices", present))
    if _MEMORY_LOCK not in subjects:
        found.append(_memory_lock(rdma, wanted))
    return found


def _rdma_subject(problem: Problem) -> str:
    if problem.path == "memory lock limit":
        return _MEMORY_LOCK
    return "environment" if problem.path.startswith("environment.") else "RDMA devices"


def _memory_lock(rdma: RdmaFacts, wanted: Wanted) -> Finding:
    """Where the library finds nothing wrong with what it was told."""
    limit = rdma.memory_lock_bytes
    if limit is None or rdma.may_lock_memory:
        return Finding("ok", _MEMORY_LOCK, "not limited")
    if wanted.locked_bytes:
        return Finding(
            "ok",
            _MEMORY_LOCK,
            f"limit {limit} bytes, needed {wanted.locked_bytes} bytes on each device",
        )
    return Finding(
        "problem",
        _MEMORY_LOCK,
        f"limit {limit} bytes, needed the size of the cache on each device",
        "tell it with --locked-bytes, or raise the limit with `ulimit -l unlimited`",
    )


def check_ports(facts: Facts, wanted: Wanted) -> list[Finding]:
    """Are the ports free that a server is to have?"""
    findings = []
    for port in wanted.ports:
        if port in facts.taken_ports:
            findings.append(
                Finding(
                    "problem",
                    "port",
                    f"{port} is taken",
                    f"find its owner with `ss -ltnp sport = :{port}`, or choose another port",
                )
            )
        else:
            findings.append(Finding("ok", "port", f"{port} is free"))
    return findings


def check_master(facts: Facts, wanted: Wanted) -> Finding | None:
    """Does the master answer?"""
    if not wanted.master:
        return None
    if facts.master_failure is None:
        return Finding("ok", "master", f"{wanted.master} accepts connections")
    return Finding(
        "problem",
        "master",
        f"{wanted.master} cannot be reached: {facts.master_failure}",
        "start it with `mooncake_master -rpc_port=PORT`, or correct the address",
    )


def check_probe(facts: Facts) -> Finding | None:
    """What did the probe say?"""
    line = facts.probe_verdict
    if line is None:
        return None
    try:
        verdict = json.loads(line)
        word, detail = str(verdict["verdict"]), str(verdict["detail"])
    except (ValueError, KeyError, TypeError):
        return Finding("problem", "probe", f"no verdict: {line or 'it printed nothing'}")
    if word == "ok":
        return Finding("ok", "probe", detail)
    return Finding("problem", "probe", f"{word}: {detail}", "do not use this build")


def judge(facts: Facts, wanted: Wanted) -> list[Finding]:
    """All findings, in the order in which they are best repaired."""
    findings: list[Finding | None] = [
        check_installation(facts),
        check_libraries(facts),
        check_build(facts),
        *check_rdma(facts, wanted),
        *check_ports(facts, wanted),
        check_master(facts, wanted),
        check_probe(facts),
    ]
    return [finding for finding in findings if finding is not None]


def known_builds() -> tuple[KnownBuild, ...]:
    """The table of known builds, from the native library."""
    return tuple(
        KnownBuild(row.distribution, row.version, row.python_tag, row.build_id, row.exercised)
        for row in known_mooncake_builds()
    )


def find_probe() -> str | None:
    """Path of ``kvprism-mooncake-probe``, or None."""
    named = os.environ.get("KVPRISM_MOONCAKE_PROBE")
    if named:
        return named
    beside = Path(__file__).parent / "lib" / "kvprism-mooncake-probe"
    if os.access(beside, os.X_OK):
        return str(beside)
    from . import _core

    beside = Path(_core.__file__).resolve().parent / "lib" / "kvprism-mooncake-probe"
    if os.access(beside, os.X_OK):
        return str(beside)
    return shutil.which("kvprism-mooncake-probe")


def run_probe(library: Path, master: str) -> str:
    """Exercises a library in a process of its own, and returns the verdict line.

    Args:
        library: The store library.
        master: Address of a master, as host:port; a local one is started when empty.
    """
    program = find_probe()
    if program is None:
        return json.dumps({"verdict": "refused", "detail": "kvprism-mooncake-probe not found"})
    if not master:
        try:
            with LocalMooncake() as mooncake:
                return run_probe(library, mooncake.master)
        except (LocalMooncakeError, OSError) as error:
            return json.dumps({"verdict": "no_master", "detail": str(error)})
    try:
        done = subprocess.run(
            [program, str(library), "--master", master],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
            timeout=_PROBE_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return json.dumps({"verdict": "timeout", "detail": str(error)})
    return done.stdout.strip()


def record_facts(
    wanted: Wanted, *, probe: bool = False, path: Sequence[str] | None = None
) -> Facts:
    """Looks at this machine.

    Args:
        wanted: Which ports, master and devices matter.
        probe: Exercise the installed library, too.
        path: Folders to search for Mooncake; ``sys.path`` when None.
    """
    installed, not_found = None, None
    try:
        library = find_mooncake_library(site_packages=path)
        installed = mooncake_wheel.describe_library(Path(library), path)
    except Error as error:
        (not_found,) = error.problems
    return Facts(
        installed=installed,
        not_found=not_found,
        known_builds=known_builds(),
        missing_libraries=() if installed is None else mooncake_wheel.missing_libraries(installed),
        python_tag=mooncake_wheel.python_tag(),
        rdma=RdmaFacts.read(),
        taken_ports=tuple(port for port in wanted.ports if not _is_free(port)),
        master_failure=_connect_failure(wanted.master) if wanted.master else None,
        probe_verdict=(
            run_probe(installed.library, wanted.master) if probe and installed is not None else None
        ),
    )


def doctor(
    probe: bool = False,
    *,
    protocol: str = "tcp",
    rdma_devices: Iterable[str] = (),
    master: str = "",
    ports: Iterable[int] = (),
    locked_bytes: int = 0,
    path: Sequence[str] | None = None,
) -> list[Finding]:
    """Looks at this machine and judges.

    Args:
        probe: Exercise the installed library in a process of its own; a local master serves when
            there is no ``master``.
        protocol: ``tcp`` or ``rdma``.
        rdma_devices: Devices to be used; any when empty.
        master: Address of ``mooncake_master``, as host:port; not checked when empty.
        ports: Ports that a server is to listen on.
        locked_bytes: Bytes that RDMA must lock; 0 when not known.
        path: Folders to search for Mooncake; ``sys.path`` when None.

    Returns:
        The findings; the set-up is usable when none is a problem.
    """
    wanted = Wanted(
        protocol=protocol,
        rdma_devices=tuple(rdma_devices),
        master=master,
        ports=tuple(ports),
        locked_bytes=locked_bytes,
    )
    return judge(record_facts(wanted, probe=probe, path=path), wanted)


def format_findings(findings: Iterable[Finding]) -> str:
    """One finding a line, and a last line that sums up."""
    listed = list(findings)
    problems = sum(finding.level == "problem" for finding in listed)
    summary = "nothing is missing" if problems == 0 else f"{problems} to repair"
    return "\n".join([*(str(finding) for finding in listed), summary])


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a port between 1 and 65535")
    return int(text)


def _address(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("'': expected host:port of a mooncake_master")
    return text


def _bytes(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of bytes")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``kvprism doctor``."""
    parser.add_argument("--probe", action="store_true", help="exercise the installed library")
    parser.add_argument("--protocol", choices=("tcp", "rdma"), default="tcp")
    parser.add_argument(
        "--rdma-device", action="append", default=[], metavar="NAME", help="a device to be used"
    )
    parser.add_argument("--master", type=_address, metavar="HOST:PORT", help="a master to reach")
    parser.add_argument(
        "--port", action="append", default=[], type=_port, help="a port that must be free"
    )
    parser.add_argument(
        "--locked-bytes", type=_bytes, default=0, metavar="N", help="bytes that RDMA must lock"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the findings; status 1 when there is a problem."""
    findings = doctor(
        args.probe,
        protocol=args.protocol,
        rdma_devices=args.rdma_device,
        master=args.master or "",
        ports=args.port,
        locked_bytes=args.locked_bytes,
    )
    print(format_findings(findings))
    return int(any(finding.level == "problem" for finding in findings))


def _is_free(port: int) -> bool:
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind(("", port))
        except (OSError, OverflowError):
            return False
    return True


def _connect_failure(address: str) -> str | None:
    try:
        parts = urllib.parse.urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return str(error)
    if not host or not port:
        return "not of the form host:port"
    try:
        socket.create_connection((host, port), _MASTER_TIMEOUT).close()
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a name that no resolver takes, such as one with an empty label
        return str(error)
    return None
