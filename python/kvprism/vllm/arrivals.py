"""Which steps' outputs vLLM has taken. One that fails, in an engine that lives on, takes with it
what its workers told, and one that fails early the metadata that they should have had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .metadata import Missed, StepEnd


class Numbered(NamedTuple):
    """What a step's metadata says of earlier ones."""

    answer: bool
    settled: tuple[tuple[int, bool], ...]
    missed: tuple[Missed, ...]


class Arrivals:
    """The scheduler's account. vLLM takes outputs in the order of their steps."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._settled: dict[int, bool] = {}
        self._sent: dict[int, tuple[tuple[str, ...], tuple[int, ...]]] = {}  # every worker needs it
        self._again: dict[range, Missed] = {}

    @property
    def pending(self) -> bool:
        """Whether a worker has to tell something again."""
        again = any(each.requests or each.abandoned for each in self._again.values())
        return again or not all(self._settled.values())

    def send(
        self, step: int, requests: tuple[str, ...], abandoned: tuple[int, ...], *, awaited: bool
    ) -> Numbered:
        """A step goes out, in which workers are told of requests that wait for a load."""
        if requests or abandoned:
            self._sent[step] = requests, abandoned
        settled, again = tuple(self._settled.items()), tuple(self._again.values())
        self._settled.clear()
        self._again.clear()
        return Numbered(awaited or bool(self._sent), settled, again)

    def take(self, ends: Sequence[StepEnd]) -> None:
        """The output of a step has come, with a word of each worker that had one to say."""
        if not ends:
            return
        self._taken.update(end.step for end in ends)
        for end in ends:
            self._settled[end.step] = True
            for step in end.untold:
                self._settled[step] = step in self._taken
            for steps in end.missed:
                sent = [self._sent[step] for step in self._sent if step in steps]
                self._again[steps] = Missed(
                    steps,
                    tuple(request for requests, _ in sent for request in requests),
                    tuple(job for _, abandoned in sent for job in abandoned),
                )
        oldest = min(min((end.step, *end.untold)) for end in ends)
        self._taken = {step for step in self._taken if step >= oldest}
        # Every worker has run this step, and one that had missed an earlier one has said so.
        newest = max(end.step for end in ends)
        missed = [steps for end in ends for steps in end.missed]
        self._sent = {
            step: sent
            for step, sent in self._sent.items()
            if step > newest or any(step in steps for steps in missed)
        }
