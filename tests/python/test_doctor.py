"""Each broken set-up has its line, and this machine's own set-up is sound."""

from __future__ import annotations

import dataclasses
import itertools
import json
import resource
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvprism import NotFoundError, doctor, mooncake_store, mooncake_wheel
from kvprism._core import RdmaFacts
from kvprism.doctor import Facts, Finding, KnownBuild, Wanted
from kvprism.local_mooncake import LocalMooncake, free_port
from kvprism.mooncake_wheel import InstalledMooncake

KNOWN = KnownBuild("mooncake-transfer-engine-non-cuda", "0.3.13.post1", "cp311", "ab" * 20)
INSTALLED = InstalledMooncake(
    distribution=KNOWN.distribution,
    version=KNOWN.version,
    python_tag="cp311",
    library=Path("/site-packages/mooncake/store.so"),
    build_id=KNOWN.build_id,
    needed=("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4"),
)
DEVICES = ["mlx5_0", "mlx5_1"]
ACTIVE = [(name, "1", "ACTIVE", True) for name in DEVICES]
SOUND = Facts(
    installed=INSTALLED,
    known_builds=(KNOWN,),
    python_tag="cp311",
    rdma=RdmaFacts(devices=DEVICES, ports=ACTIVE),
)
RDMA = Wanted(protocol="rdma")


def the_problem(facts: Facts, wanted: Wanted | None = None) -> Finding:
    """The only problem that there is."""
    problems = [f for f in doctor.judge(facts, wanted or Wanted()) if f.level == "problem"]
    assert len(problems) == 1, problems
    return problems[0]


def test_sound_machine_has_no_problem() -> None:
    wanted = Wanted(protocol="rdma", rdma_devices=("mlx5_1",), master="h:1", ports=(20000,))
    findings = doctor.judge(SOUND, wanted)
    assert [f for f in findings if f.level != "ok"] == []
    assert doctor.format_findings(findings).endswith("nothing is missing")


def test_not_installed() -> None:
    nowhere = doctor.record_facts(Wanted(), path=["/nonexistent"])
    finding = the_problem(dataclasses.replace(SOUND, installed=None, not_found=nowhere.not_found))
    assert finding.message == (
        "library = searched /nonexistent: expected an installed distribution that lists "
        "mooncake/store.so"
    )
    assert finding.hint.startswith("pip install mooncake-transfer-engine-non-cuda==")


def test_the_library_that_the_environment_names_is_the_one_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine opens it whatever is installed beside it."""
    named = tmp_path / "libstore.so"
    monkeypatch.setenv("KVPRISM_MOONCAKE_LIBRARY", str(named))
    finding = doctor.doctor()[0]
    assert (finding.level, finding.message) == (
        "problem",
        f"KVPRISM_MOONCAKE_LIBRARY = {named}: expected a file",
    )
    core = Path(sys.modules["kvprism._core"].__file__ or "")
    named.write_bytes(core.read_bytes())
    first, _, build = doctor.doctor()[:3]
    assert (first.level, first.message) == ("ok", f"a library by itself, {named}")
    assert build.level == "problem"
    assert build.message.startswith("a library by itself with build-id ")


@pytest.mark.mooncake
def test_an_installed_library_that_the_environment_names_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = mooncake_wheel.find_installed_mooncake()
    assert installed is not None
    monkeypatch.setenv("KVPRISM_MOONCAKE_LIBRARY", str(installed.library))
    assert doctor.record_facts(Wanted(), path=["/nonexistent"]).installed == dataclasses.replace(
        installed, distribution="", version="", python_tag=""
    )
    assert doctor.record_facts(Wanted()).installed == installed
    assert [f for f in doctor.doctor() if f.level == "problem"] == []


def test_unknown_version() -> None:
    other = dataclasses.replace(INSTALLED, version="0.4.0", build_id="cd" * 20)
    finding = the_problem(dataclasses.replace(SOUND, installed=other))
    assert finding.subject == "build"
    assert "0.4.0" in finding.message
    assert "cd" * 20 in finding.message
    assert "known are mooncake-transfer-engine-non-cuda 0.3.13.post1" in finding.message
    assert "--probe" in finding.hint


def test_wheel_of_another_python() -> None:
    other = dataclasses.replace(INSTALLED, python_tag="cp310")
    finding = the_problem(dataclasses.replace(SOUND, installed=other))
    assert "is for cp310, and this Python is cp311" in finding.message


@pytest.mark.parametrize(
    ("missing", "hint"),
    [
        (("libibverbs.so.1",), "apt-get install libibverbs1"),
        (("libnuma.so.1", "libcurl.so.4"), "apt-get install libnuma1 libcurl4"),
        (("libcuda.so.1", "libcudart.so.12"), "mooncake-transfer-engine-non-cuda"),
        (("libwhat.so.1",), "install the packages that have them"),
    ],
)
def test_missing_system_library(missing: tuple[str, ...], hint: str) -> None:
    finding = the_problem(dataclasses.replace(SOUND, missing_libraries=missing))
    assert finding.message == f"missing: {', '.join(missing)}"
    assert hint in finding.hint


def with_rdma(**facts: Any) -> Facts:
    return dataclasses.replace(
        SOUND, rdma=RdmaFacts(**{"devices": DEVICES, "ports": ACTIVE, **facts})
    )


def test_rdma_without_device() -> None:
    bare = with_rdma(devices=[], ports=[])
    finding = the_problem(bare, RDMA)
    assert finding.subject == "RDMA devices"
    assert finding.message == (
        "protocol = rdma: expected at least one RDMA device in /sys/class/infiniband"
    )
    assert "protocol tcp" in finding.hint
    assert [f for f in doctor.judge(bare, Wanted()) if f.level == "problem"] == []


def test_rdma_device_that_is_not_there() -> None:
    finding = the_problem(SOUND, Wanted(protocol="rdma", rdma_devices=("mlx5_99", "mlx5_0")))
    assert finding.message == (
        "rdma_devices[0] = mlx5_99: expected one of the devices in /sys/class/infiniband: "
        "mlx5_0, mlx5_1"
    )


def test_rdma_without_a_port_that_is_up() -> None:
    one_down = with_rdma(ports=[("mlx5_0", "1", "DOWN", True), *ACTIVE[1:]])
    assert [f for f in doctor.judge(one_down, RDMA) if f.level == "problem"] == []
    finding = the_problem(one_down, dataclasses.replace(RDMA, rdma_devices=("mlx5_0",)))
    assert finding.subject == "RDMA devices"
    assert finding.message == (
        "rdma_devices[0] = mlx5_0 port 1 is DOWN: expected an active port with an address (GID)"
    )
    unaddressed = [("mlx5_0", "1", "ACTIVE", False), ("mlx5_1", "1", "DOWN", True)]
    assert the_problem(with_rdma(ports=unaddressed), RDMA).message == (
        "protocol = mlx5_0 port 1 is ACTIVE without an address (GID), mlx5_1 port 1 is DOWN: "
        "expected an active port with an address (GID)"
    )


def test_rdma_with_an_environment_that_forces_tcp() -> None:
    finding = the_problem(with_rdma(forced_tcp="1"), RDMA)
    assert finding.subject == "environment"
    assert finding.message == ("environment.MC_FORCE_TCP = 1: expected unset with protocol rdma")
    assert [f for f in doctor.judge(with_rdma(forced_tcp="1"), Wanted()) if f.hint] == []


def test_memory_lock_too_small() -> None:
    """All devices register all that is registered."""
    small = with_rdma(memory_lock_bytes=8 << 30)
    wanted = Wanted(protocol="rdma", locked_bytes=6 << 30)
    finding = the_problem(small, wanted)
    assert finding.message == (
        "memory lock limit = 8589934592 bytes: expected at least 6442450944 bytes, which RDMA "
        "must lock for each of 2 devices"
    )
    assert "ulimit -l" in finding.hint
    assert "container" in finding.hint
    on_one = dataclasses.replace(wanted, rdma_devices=("mlx5_0",))
    assert doctor.judge(small, on_one)[-1] == Finding(
        "ok", "memory lock", "limit 8589934592 bytes, needed 6442450944 bytes on each device"
    )
    assert [f for f in doctor.judge(small, Wanted(locked_bytes=6 << 30)) if f.level != "ok"] == [
        Finding("note", "RDMA devices", "mlx5_0, mlx5_1")
    ]
    assert the_problem(small, RDMA).message == (
        "limit 8589934592 bytes, needed the size of the cache on each device"
    )
    privileged = with_rdma(memory_lock_bytes=8 << 30, may_lock_memory=True)
    assert doctor.judge(privileged, wanted)[-1] == Finding("ok", "memory lock", "not limited")


def test_rdma_facts_are_those_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    (port / "gids" / "0").write_text("fe80:0000:0000:0000:b83f:d2ff:fe12:3457\n")
    monkeypatch.setenv("MC_FORCE_TCP", "yes")
    found = RdmaFacts.read(str(tmp_path))
    assert (found.folder, found.devices) == (str(tmp_path), ["mlx5_0"])
    assert found.ports == [("mlx5_0", "1", "DOWN", True)]
    assert found.forced_tcp == "yes"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert found.memory_lock_bytes == (None if soft == resource.RLIM_INFINITY else soft)
    # What ends a start is told beforehand in the same words.
    with pytest.raises(NotFoundError) as refused:
        mooncake_store(master="127.0.0.1:1", protocol="rdma", rdma_device_folder=str(tmp_path))
    assert refused.value.problems == found.problems()
    assert [problem.path for problem in found.problems()] == [
        "protocol",
        "environment.MC_FORCE_TCP",
    ]


def test_port_taken() -> None:
    taken = dataclasses.replace(SOUND, taken_ports=(20001,))
    finding = the_problem(taken, Wanted(ports=(20000, 20001)))
    assert finding.message == "20001 is taken"
    assert "ss -ltnp" in finding.hint


def test_master_unreachable() -> None:
    finding = the_problem(
        dataclasses.replace(SOUND, master_failure="Connection refused"), Wanted(master="h:50051")
    )
    assert finding.message == "h:50051 cannot be reached: Connection refused"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"verdict": "crash", "detail": "signal Segmentation fault"}', "crash: signal"),
        ("", "no verdict"),
        ("[]", "no verdict"),
    ],
)
def test_bad_verdict(line: str, message: str) -> None:
    finding = the_problem(dataclasses.replace(SOUND, probe_verdict=line))
    assert finding.message.startswith(message)


def test_facts_of_ports_and_masters_are_looked_up() -> None:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        wanted = Wanted(ports=(port,), master=f"127.0.0.1:{port}")
        facts = doctor.record_facts(wanted, path=["/nonexistent"])
    assert facts.installed is None
    assert facts.not_found is not None
    assert facts.not_found.value == "searched /nonexistent"
    assert facts.taken_ports == (port,)
    assert facts.master_failure is None
    for address, reason in [
        (f"127.0.0.1:{port}", "refused"),
        ("127.0.0.1", "host:port"),
        ("[::1", "IPv6"),
        ("..:50051", "label"),
    ]:
        failure = doctor.record_facts(Wanted(master=address), path=[]).master_failure
        assert failure is not None
        assert reason in failure


def test_table_of_builds_is_the_native_one() -> None:
    rows = doctor.known_builds()
    assert any(row.exercised and row.version == "0.3.13.post1" for row in rows)
    program = doctor.find_probe()
    assert program is not None
    listed = json.loads(
        subprocess.run([program, "--list-json"], capture_output=True, check=True).stdout
    )
    assert [row["build_id"] for row in listed] == [row.build_id for row in rows]


def fake_distribution(
    folder: Path, library: str, name: str = "mooncake-transfer-engine-test", version: str = "9.9"
) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: cp311-cp311-manylinux_2_28_x86_64\n")
    (info / "RECORD").write_text(f"mooncake/engine.so,,\n{library},,\n")
    (folder / "mooncake").mkdir(exist_ok=True)
    (folder / library).write_bytes(b"no library")


@pytest.mark.parametrize(
    "library", ["mooncake/store.so", "mooncake/_store.cpython-311-x86_64-linux-gnu.so"]
)
def test_library_is_found_whatever_its_name(tmp_path: Path, library: str) -> None:
    fake_distribution(tmp_path, library)
    found = mooncake_wheel.find_installed_mooncake([str(tmp_path)])
    assert found is not None
    assert (found.distribution, found.version, found.python_tag) == (
        "mooncake-transfer-engine-test",
        "9.9",
        "cp311",
    )
    assert found.library == (tmp_path / library).resolve()
    assert (found.build_id, found.needed) == ("", ())
    with pytest.raises(FileNotFoundError, match="mooncake_master"):
        found.program("mooncake_master")


def library_with(build_id: str) -> bytes:
    """What is read of a library: an ELF file of one note."""
    note = struct.pack("<III", 4, len(build_id) // 2, 3) + b"GNU\0" + bytes.fromhex(build_id)
    header = struct.pack("<4sBB10x", b"\x7fELF", 2, 1)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return header + struct.pack("<IIQQQQQQ", 4, 4, 120, 0, 0, len(note), 0, 4) + note


def two_distributions(folder: Path, first: KnownBuild, second: KnownBuild) -> Facts:
    """Facts of a folder in which the second one was installed over the first."""
    for each in (first, second):
        fake_distribution(folder, "mooncake/store.so", each.distribution, each.version)
    (folder / "mooncake/store.so").write_bytes(library_with(second.build_id))
    return doctor.record_facts(Wanted(), path=[str(folder)])


def of_each_distribution() -> list[KnownBuild]:
    return list({row.distribution: row for row in doctor.known_builds()}.values())


def test_of_two_distributions_the_one_that_the_file_is_of_is_judged(tmp_path: Path) -> None:
    """A folder's entries have any order, so each is the right one once."""
    for at, (first, second) in enumerate(itertools.permutations(of_each_distribution(), 2)):
        folder = tmp_path / str(at)
        folder.mkdir()
        facts = two_distributions(folder, first, second)
        assert facts.installed is not None
        assert facts.installed.name == f"{second.distribution} {second.version}"
        build = doctor.check_build(facts)
        assert build is not None
        assert build.level == "ok"


def test_a_file_of_another_distribution_is_not_known() -> None:
    """The library would refuse it, because version and build must agree."""
    first, second = of_each_distribution()[:2]
    other = dataclasses.replace(INSTALLED, distribution="mooncake-a", build_id=second.build_id)
    facts = dataclasses.replace(SOUND, installed=other, known_builds=(first, second))
    finding = the_problem(facts)
    assert finding.subject == "build"
    assert finding.message.startswith(f"mooncake-a {INSTALLED.version} with build-id ")
    assert finding.hint == (
        f"its file is that of {second.distribution} {second.version}, which has overwritten it: "
        "uninstall both, then install one of them"
    )


def test_facts_of_a_real_library() -> None:
    build_id, needed = mooncake_wheel.read_library(
        Path(sys.modules["kvprism._core"].__file__ or "")
    )
    assert any(name.startswith("libkvprism.so") for name in needed)
    assert build_id == "" or len(build_id) == 40
    libc = mooncake_wheel.find_system_library("libc.so.6")
    assert libc is not None
    assert mooncake_wheel.find_system_library("libnothing.so.99") is None


@pytest.mark.mooncake
def test_this_machine() -> None:
    port = free_port()
    findings = doctor.doctor(ports=[port])
    assert [f for f in findings if f.level == "problem"] == []
    assert doctor.doctor(master=f"127.0.0.1:{port}")[-1].level == "problem"


@pytest.mark.mooncake
def test_probe_of_the_installed_library() -> None:
    with LocalMooncake() as mooncake:
        findings = doctor.doctor(True, master=mooncake.master)
    assert findings[-1].subject == "probe"
    assert findings[-1].level == "ok", findings[-1]


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    from kvprism.cli import main

    status = main(["doctor", "--master", "127.0.0.1:1"])
    output = capsys.readouterr().out
    assert status == 1
    assert "127.0.0.1:1 cannot be reached" in output
    assert output.splitlines()[-1].endswith("to repair")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--master", ""], "--master: '': expected host:port of a mooncake_master"),
        (["--port", "70000"], "--port: '70000': expected a port between 1 and 65535"),
        (["--port", "0"], "--port: '0': expected a port between 1 and 65535"),
        (["--locked-bytes", "-5"], "--locked-bytes"),
    ],
)
def test_arguments_that_mean_nothing(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvprism.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
