"""Processes that a test starts: what they say is waited for with a bound, and none outlives it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvprism.local_mooncake import LocalMooncake, die_with_parent

SCRIPTS = Path(__file__).parent / "process_scripts.py"
# Far beyond what anything takes, also for many processes on a busy machine.
BOUND_SECONDS = 300.0


class Child:
    """A program of process_scripts.py. What it complains about goes to a file, so that it never
    waits for a reader."""

    def __init__(self, name: str, master: str, *arguments: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by end()
        self._said = b""
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPTS), name, master, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            preexec_fn=die_with_parent(),
        )

    @property
    def errors(self) -> str:
        """What it has complained about so far."""
        self._errors.flush()
        self._errors.seek(0)
        return self._errors.read()

    def line(self, bound: float = BOUND_SECONDS) -> str:
        """The next line; "" when it has closed its output."""
        assert self.process.stdout is not None
        end = time.monotonic() + bound
        while b"\n" not in self._said:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise AssertionError(f"silent for {bound:g} s: {self.errors}")
            more = os.read(self.process.stdout.fileno(), 4096)
            if not more:
                break
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def says(self, word: str, bound: float = BOUND_SECONDS) -> None:
        """Waits for a line, which must be this one."""
        line = self.line(bound)
        assert line == word, f"{line!r} instead of {word!r}: {self.errors}"

    def go_on(self) -> None:
        """Ends its wait for us."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def ends_well(self, bound: float = BOUND_SECONDS) -> str:
        """Waits for its end, which must be a good one; the rest of what it says."""
        end = time.monotonic() + bound
        said = []
        while line := self.line(max(0.0, end - time.monotonic())):
            said.append(line)
        code = self.process.wait(max(0.1, end - time.monotonic()))
        errors = self.errors
        assert code == 0, f"status {code}: {errors}"
        assert "terminate" not in errors, errors
        return "\n".join(said)

    def end(self) -> None:
        """Kills it if it still runs; may be repeated."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self._errors.close()


class Children:
    """Owns the processes of one test."""

    def __init__(self) -> None:
        self._all: list[Child] = []

    def start(self, name: str, mooncake: LocalMooncake, *arguments: str) -> Child:
        """Starts a program of process_scripts.py on that master."""
        child = Child(name, mooncake.master, *arguments)
        self._all.append(child)
        return child

    def end(self) -> None:
        """Kills what still runs."""
        for child in self._all:
            child.end()
