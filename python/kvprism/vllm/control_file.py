"""A file that says what the store is used for, read again while the engine runs."""

from __future__ import annotations

import logging
import threading

from .json_file import read_object
from .problems import Problems, suggestion

logger = logging.getLogger("vllm.kvprism")

_FIRST_LOOK_SECONDS = 5.0
MODES = ("read_write", "read_only", "write_only", "off")


class ControlFile:
    """Reads ``{"mode": "read_only"}``. A thread does so, since no step may wait for a file system.

    ``take`` and ``close`` come from one thread, vLLM's scheduler.
    """

    def __init__(self, path: str, every_seconds: float = 1.0) -> None:
        self._path = path
        self._every = every_seconds
        self._problem = ""  # told last
        self._read = ""  # the mode that was read last; only the thread writes it
        self._taken = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvprism-control", daemon=True)
        self._looked = threading.Event()
        self._thread.start()
        # The first step should know the mode; a file system that hangs must not hold up the start.
        self._looked.wait(_FIRST_LOOK_SECONDS)

    def take(self) -> str | None:
        """The mode of the file when it is another one than was taken; None otherwise."""
        read = self._read
        if read == self._taken:
            return None
        self._taken = read
        return read

    def close(self) -> None:
        """Ends the thread; may be repeated."""
        self._ended.set()
        self._thread.join(5.0)

    def _watch(self) -> None:
        self._look()
        self._looked.set()
        while not self._ended.wait(self._every):
            self._look()

    def _look(self) -> None:
        problems = Problems()
        mode = self._mode(problems)
        problem = "\n  ".join(problems.lines)
        if problem and problem != self._problem:
            logger.error("kvprism: control_file changes nothing:\n  %s", problem)
        self._problem = problem
        if mode:
            self._read = mode

    def _mode(self, problems: Problems) -> str:
        """An empty string where the file does not say."""
        path = self._path
        content = read_object(path, "control_file", problems)
        if content is None:
            return ""
        for name in content:
            if name != "mode":
                problems.add(f"{path}: {name}", content[name], "mode", suggestion(name, ["mode"]))
        mode = content.get("mode")
        if mode not in MODES:
            hint = suggestion(mode, MODES) if isinstance(mode, str) else ""
            problems.add(f"{path}: mode", mode, "one of " + ", ".join(MODES), hint)
        return "" if problems.lines else str(mode)
