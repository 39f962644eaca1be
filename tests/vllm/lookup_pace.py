"""Lookups of the built-in connector at the pace of ours, for tests that compare the two."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

MISS = SimpleNamespace(hit_length=0)


class PacedLookups:
    """In place of the client of the built-in connector's lookup server.

    An answer is kept until there are blocks, or until the engine itself has less than it had; where
    the engine has all that may be used, nothing is asked. When ``late``, the store is asked at once
    and the answer given from the second time on.
    """

    def __init__(self, ask: Callable[[str, int, Any], Any], hit_tokens: int, *, late: bool) -> None:
        self._ask = ask
        self._hit_tokens = hit_tokens  # hits end on multiples of it
        self._late = late
        self._answers: dict[str, tuple[int, Any]] = {}
        self.computed = 0  # tokens of the request that the engine has

    def lookup(self, name: str, tokens: int, hashes: Any, non_block: bool) -> Any:
        assert non_block == self._late
        if (tokens - 1) // self._hit_tokens * self._hit_tokens <= self.computed:
            return MISS
        asked, answer = self._answers.get(name, (1 << 30, None))
        if asked <= self.computed:
            return answer
        answer = self._ask(name, tokens, hashes)
        self._answers[name] = self.computed, answer
        return None if self._late else answer

    def discard(self, name: str) -> None:
        self._answers.pop(name, None)


def pace(half: Any, lookups: PacedLookups) -> None:
    """Gives a scheduler's half of the built-in connector these lookups."""
    half.client = lookups
    allocated = half.update_state_after_alloc

    def then_forget(request: Any, *arguments: Any) -> None:
        lookups.discard(request.request_id)
        allocated(request, *arguments)

    half.update_state_after_alloc = then_forget


def join(queue: Any, bound: float) -> None:
    """queue.join() with a bound in seconds."""
    with queue.all_tasks_done:
        assert queue.all_tasks_done.wait_for(lambda: not queue.unfinished_tasks, bound)
