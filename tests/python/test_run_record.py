"""Recordings of a scheduler, the command that repeats them, health and the flight record."""

from __future__ import annotations

import json
from pathlib import Path

import kvprism
import pytest
from kvprism._core import replay_run
from kvprism.cli import main
from store_helpers import Rank, hashes

SOURCES, TARGETS = [3, 1, 7], [5, 6, 2]
TOKENS = list(range(13))


def recorded(path: Path) -> Rank:
    rank = Rank(record_to=str(path))
    rank.save(TOKENS, SOURCES)
    rank.scheduler.finished(1)
    offered = rank.lookup(TOKENS)
    assert offered == 12
    assert rank.scheduler.allocated(2, offered, [TARGETS]) is not None
    rank.step()
    (end,) = rank.scheduler.take_load_ends()
    assert end.complete
    rank.scheduler.finished(2)
    rank.close()
    return rank


def test_a_recorded_run_is_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    recorded(path)
    assert main(["replay-run", "--json", str(path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["same"] is True
    assert result["plans"] == 2
    assert result["ignored_bytes"] == 0
    assert result["ended"] is True
    assert result["recorded_by"] == result["repeated_by"]
    assert result["recorded_by"].startswith(f"kvprism {kvprism.__version__}, ")
    assert main(["replay-run", str(path)]) == 0
    assert capsys.readouterr().out.endswith("with a plan\nthe same\n")


def test_a_file_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none"
    assert main(["replay-run", str(path)]) == 2, "1 would mean: other decisions"
    assert capsys.readouterr().err == f"kvprism replay-run: {path}: No such file or directory\n"


def test_a_changed_decision_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    recorded(path)
    content = path.read_bytes()
    answer = bytes(8) + (12).to_bytes(8, "little")  # not pending, 12 tokens
    at = content.rindex(answer)
    path.write_bytes(content[: at + 8] + (8).to_bytes(8, "little") + content[at + 16 :])
    assert main(["replay-run", str(path)]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT: call " in out
    assert ", lookup in step " in out
    assert out.endswith("it returned 0 8, and now 0 c\n")


def test_a_cut_file_is_repeated_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    recorded(path)
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    assert main(["replay-run", str(path)]) == 0
    out = capsys.readouterr().out
    assert "of a last call that was cut off were ignored\n" in out
    assert (
        "the recording has no end: its program was killed or still runs, its disk was full, or its"
        " scheduler was not destroyed\n"
    ) in out
    assert out.endswith("the same\n")


def test_bytes_behind_the_end_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    recorded(path)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"more")
    assert main(["replay-run", str(path)]) == 2
    assert f"byte {size} = 4 more bytes" in capsys.readouterr().err


def test_what_is_no_recording_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    path.write_bytes(b"something else")
    assert main(["replay-run", str(path)]) == 2
    assert "recording: magic" in capsys.readouterr().err
    assert main(["replay-run", str(tmp_path / "nothing")]) == 2
    with pytest.raises(kvprism.Error, match="bytes = 0"):
        replay_run(b"")
    with pytest.raises(kvprism.Error, match="record_to"):
        Rank(record_to=str(tmp_path / "no" / "folder"))


def test_a_recording_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(kvprism.Error, match="epoch"):
        Rank(record_to=str(path), epoch=0)
    assert not path.exists(), "what is refused leaves no file behind"
    recorded(path)
    content = path.read_bytes()
    with pytest.raises(kvprism.Error, match=r"record_to.*File exists"):
        Rank(record_to=str(path))
    assert path.read_bytes() == content
    used, again = Rank(), tmp_path / "again"
    with pytest.raises(kvprism.Error):
        Rank(record_to=str(again), index=used.store)
    assert not again.exists()


def test_a_registry_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "run"
    recorded(path)
    result = replay_run(path.read_bytes(), registry=kvprism.SpecRegistry.builtin())
    assert result["same"] is True


def test_requests_with_saves_in_flight_are_named() -> None:
    rank = Rank()
    assert rank.scheduler.saving_requests() == set()
    rank.scheduler.advanced(7, len(TOKENS), hashes(TOKENS))
    span = rank.scheduler.wants_save(7)
    assert span is not None
    rank.scheduler.save(7, span, [SOURCES])
    rank.scheduler.finished(7)
    assert rank.scheduler.saving_requests() == {7}
    rank.step()
    assert rank.scheduler.saving_requests() == set()
    rank.close()


def test_health_and_flight_record() -> None:
    rank = Rank()
    rank.save(TOKENS, SOURCES)
    rank.scheduler.end_step()
    assert rank.scheduler.health() == "healthy"
    kinds = [line.split()[1] for line in rank.scheduler.flight_record().splitlines()]
    assert kinds == ["save", "outcome", "quiet"]
    assert len(rank.scheduler.flight_record(most=1).splitlines()) == 1
    counters = rank.scheduler.counters()
    assert counters["health"] == counters["incidents"] == 0
    told = counters["save_time"]
    assert isinstance(told, dict)
    assert set(told) == {"count", "sum_us"}
    times = rank.scheduler.durations()["save_time"]
    assert set(rank.scheduler.durations()) == {"lookup_time", "load_time", "save_time"}
    assert times["count"] == 1
    assert sum(n for name, n in times.items() if name.startswith("up_to_us_")) == 1
    rank.scheduler.set_mode("off")
    rank.scheduler.end_step()
    assert rank.scheduler.health() == "off"
    assert rank.scheduler.counters()["health"] == 2
    rank.close()


def test_what_is_no_recording_is_not_read_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay-run", "/dev/zero"]) == 2
    assert capsys.readouterr().err.startswith("kvprism replay-run: recording: magic = 0: ")
