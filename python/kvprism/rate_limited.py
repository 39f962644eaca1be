"""Log lines that could flood."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable


class RateLimited:
    """Lines that could flood a log: at most one in an interval, with a count of the others.

    Args:
        logger: Where they go.
        level: Of all of them.
        interval_seconds: Between two.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        logger: logging.Logger,
        level: int,
        interval_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._level = level
        self._interval = interval_seconds
        self._clock = clock
        self._last = -math.inf
        self._held_back = 0

    def __call__(self, text: str, *args: object) -> None:
        """Logs the line, or holds it back.

        Args:
            text: With a place for each argument.
            args: What fills the places.
        """
        now = self._clock()
        if now - self._last < self._interval:
            self._held_back += 1
            return
        self._last = now
        if self._held_back:
            text += " (and %d more since the last line)"
            args += (self._held_back,)
            self._held_back = 0
        self._logger.log(self._level, text, *args)
