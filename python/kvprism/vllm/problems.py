"""Every problem of an input at once, each with where, what, the expectation and a hint."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from .._core import ConfigError


class Problems:
    """Collects what is wrong, and raises it together."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, path: str, value: object, expected: str, hint: str = "") -> None:
        """Adds one problem."""
        text = f"{path} = {value!r}: expected {expected}"
        self.lines.append(f"{text} ({hint})" if hint else text)

    def raise_if_any(self, subject: str) -> None:
        """Raises ConfigError when there is a problem."""
        if not self.lines:
            return
        count = len(self.lines)
        head = f"{subject}: {count} problem{'s' if count > 1 else ''}"
        raise ConfigError("\n  ".join([head, *self.lines]))


def suggestion(name: str, known: Iterable[str]) -> str:
    """A hint that names the known word most like this one, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else ""
