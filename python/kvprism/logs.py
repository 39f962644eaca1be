"""The library's own log lines, for :mod:`logging`."""

from __future__ import annotations

from ._core import take_log_lines

TYPE_CHECKING = False  # of our own: logging and typing take longer to import than the library
if TYPE_CHECKING:
    import logging


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
        import logging

        target = logger or logging.getLogger("kvprism")
        for level, text in lines:
            target.log(getattr(logging, level.upper()), "%s", text)
    return len(lines)
