"""The library's own log lines, for :mod:`logging`."""

from __future__ import annotations

import logging

from ._core import take_log_lines

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def forward_log(logger: logging.Logger | None = None) -> int:
    """Hands the lines since the last call to a logger.

    Native threads never call into Python, so somebody has to ask: an engine does so once a step,
    which costs next to nothing when there is no line.

    Args:
        logger: Where they go; the logger "kvprism" by default.

    Returns:
        How many lines there were.
    """
    lines = take_log_lines()
    if lines:
        target = logger or logging.getLogger("kvprism")
        for level, text in lines:
            target.log(_LEVELS[level], "%s", text)
    return len(lines)
