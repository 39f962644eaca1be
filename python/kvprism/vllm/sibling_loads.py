"""Loads of MultiConnector's other children that happen inside a step, and may fail there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

_NULL = 0  # the block that stands for none


@dataclass
class _Held:
    """A request that is not saved yet."""

    blocks: list[int]
    until: int  # the last step whose output must be there first


class SiblingLoads:
    """Which requests wait to be saved, and which may not be, where such a load may have failed.

    vLLM counts what such a load brings as computed, and caches its blocks, when it schedules the
    step; which blocks failed is known with the step's output. Whatever begins meanwhile with tokens
    that it has not computed may rest on them.
    """

    def __init__(self) -> None:
        self._open: list[int] = []  # steps with such loads whose output is not there
        self._held: dict[str, _Held] = {}
        self._bad: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._open or self._held)

    def __contains__(self, name: str) -> bool:
        return name in self._held

    @property
    def awaited(self) -> bool:
        """Whether workers have to tell of the ends of steps."""
        return bool(self._open)

    def ended(self, step: int, invalid: Iterable[int]) -> None:
        """A step's output is there, with the blocks that were not loaded."""
        if self._held:
            self._bad.update(invalid)
        if any(earlier < step for earlier in self._open):
            # It failed, and what it has loaded nobody knows.
            for held in self._held.values():
                self._bad.update(held.blocks)
        self._open = [each for each in self._open if each > step]

    def step(
        self,
        step: int,
        inside: bool,
        begun: Mapping[str, int | None],
        table: Callable[[str], list[int]],
    ) -> tuple[list[str], set[int]]:
        """Takes a step that has been scheduled.

        Args:
            step: Its number.
            inside: Whether other children load in it.
            begun: Requests that begin with blocks that they have not computed, and how many; None:
                it may be any of theirs.
            table: The blocks of a request, none if it is not scheduled.

        Returns:
            Requests whose blocks must never be saved, and blocks that nobody may find.
        """
        refused: list[str] = []
        spoiled: set[int] = set()

        def judge(name: str, rests_on: list[int], blocks: list[int]) -> None:
            wrong = (self._bad | spoiled) - {_NULL}
            if not wrong.isdisjoint(rests_on):
                refused.append(name)
                first = next(at for at, block in enumerate(blocks) if block in wrong)
                spoiled.update(blocks[first:])

        for name, held in self._held.items():
            held.blocks = list(dict.fromkeys((*held.blocks, *table(name))))
            if self._bad:
                # In the order in which they began: the later ones rest on the earlier.
                judge(name, held.blocks, held.blocks)
        if self._bad:
            for name, count in begun.items():
                blocks = table(name)
                judge(name, blocks[:count], blocks)
        self._bad.clear()
        first_open = min(self._open, default=step)
        for name in [name for name, held in self._held.items() if held.until < first_open]:
            del self._held[name]
        for name in refused:
            self._held.pop(name, None)
        if inside:
            self._open.append(step)
        if self._open:
            for name in begun:
                if name not in refused:
                    # One that was preempted meanwhile also keeps what it had.
                    held = self._held.setdefault(name, _Held(table(name), 0))
                    held.until = self._open[-1]
        return refused, spoiled
