"""Loads of MultiConnector's other children that happen inside a step, and may fail there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

_NULL = 0  # the block that stands for none


@dataclass
class _Held:
    """A request that is not saved yet."""

    blocks: list[int] = field(default_factory=list)  # as they stand in its table
    until: int = 0  # the last step whose output must be there first

    def add(self, blocks: Iterable[int]) -> None:
        """Its table now; one that was preempted meanwhile also keeps what it had."""
        self.blocks = list(dict.fromkeys((*self.blocks, *blocks)))


class SiblingLoads:
    """Which requests wait to be saved, and which may not be, where such a load may have failed.

    vLLM counts what such a load brings as computed, and caches its blocks, when it schedules the
    step; which blocks failed is known with the step's output. Whatever begins meanwhile with tokens
    that it has not computed may rest on them.
    """

    def __init__(self) -> None:
        self._open: list[int] = []  # steps with such loads whose output is not there
        self._held: dict[str, _Held] = {}

    def __bool__(self) -> bool:
        return bool(self._open or self._held)

    def __contains__(self, name: str) -> bool:
        return name in self._held

    @property
    def awaited(self) -> bool:
        """Whether workers have to tell of the ends of steps."""
        return bool(self._open)

    def ended(self, step: int, invalid: Iterable[int]) -> tuple[list[str], set[int]]:
        """A step's output is there, with the blocks that were not loaded.

        Returns:
            Requests whose blocks must never be saved, and blocks that nobody may find from now on.
        """
        wrong = set(invalid)
        if any(earlier < step for earlier in self._open):
            # It failed, and what it has loaded nobody knows.
            wrong.update(*(held.blocks for held in self._held.values()))
        wrong.discard(_NULL)
        self._open = [each for each in self._open if each > step]
        refused: list[str] = []
        spoiled: set[int] = set()
        # In whichever order they began: what rests on wrong blocks others may have found.
        while resting := [
            name for name, held in self._held.items() if not wrong.isdisjoint(held.blocks)
        ]:
            refused += resting
            for name in resting:
                blocks = self._held.pop(name).blocks
                first = next(at for at, block in enumerate(blocks) if block in wrong)
                spoiled.update(blocks[first:])
            spoiled.discard(_NULL)
            wrong |= spoiled
        return refused, spoiled

    def step(
        self,
        step: int,
        inside: bool,
        begun: Mapping[str, Iterable[int]],
        table: Callable[[str], Iterable[int]],
    ) -> None:
        """Takes a step that has been scheduled.

        Args:
            step: Its number.
            inside: Whether other children load in it.
            begun: Requests that begin with tokens that they have not computed, and their blocks;
                also those that wait for a load first.
            table: The blocks of a request, none if it is not scheduled.
        """
        first_open = min(self._open, default=step)
        for name, held in list(self._held.items()):
            if held.until < first_open:
                del self._held[name]
            else:
                held.add(table(name))
        if inside:
            self._open.append(step)
        if self._open:
            for name, blocks in begun.items():
                held = self._held.setdefault(name, _Held())
                held.add(blocks)
                held.until = self._open[-1]
