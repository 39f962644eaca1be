"""Which steps' outputs vLLM has taken. One that fails, in an engine that lives on, takes with it
what its workers told, and one that fails early the metadata that they should have had.

A worker that tells of loads keeps what it told. From then on each output's StepEnd lists the steps
of which it has not heard whether their output was taken; outputs are taken in order, so when the
next one is, that is known, and the next metadata has the answer (`settled`): taken, and the worker
forgets, or lost, and it tells again (of several ranks it tells the log). One that was not bound for
some steps says so (`missed`), and the answer names the requests whose loads those steps should have
begun, which it tells as failed. Answers may be lost too: the worker lists until it has them.

So the scheduler remembers whom a step's metadata named until the end of that step or a later one
has come (`answer` makes all workers tell it): each has then run it or says that it missed it. Of
the outputs that were taken it remembers those from the oldest step on that a worker still lists.

Each step that computes tokens is answered: vLLM schedules ahead, and would put the tokens of later
steps in the places of those that a lost output had (`take` tells which were lost).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from .metadata import Missed, StepEnd

_IN_FLIGHT = 1024  # steps; more than any engine has


class Answers(NamedTuple):
    """What a step's metadata says of earlier ones, and whether its own end is asked for."""

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
        self._computing: dict[int, Collection[str]] = {}  # steps in flight, and their requests

    @property
    def pending(self) -> bool:
        """Whether a worker has to tell something again."""
        again = any(each.requests or each.abandoned for each in self._again.values())
        return again or not all(self._settled.values())

    def send(
        self,
        step: int,
        requests: tuple[str, ...],
        abandoned: tuple[int, ...],
        *,
        awaited: bool = False,
        computed: Collection[str] = (),
    ) -> Answers:
        """A step goes out, in which workers are told of requests that wait for a load.

        Args:
            step: Its number.
            requests: Those that wait.
            abandoned: Jobs that nobody waits for.
            awaited: Whether its end has to be told in any case.
            computed: Requests of which it computes tokens that may be saved.
        """
        if requests or abandoned:
            self._sent[step] = requests, abandoned
        if computed:
            self._computing[step] = computed
            if len(self._computing) > _IN_FLIGHT:  # no worker answers at all
                del self._computing[next(iter(self._computing))]
        settled, again = tuple(self._settled.items()), tuple(self._again.values())
        self._settled.clear()
        self._again.clear()
        return Answers(awaited or bool(self._sent or self._computing), settled, again)

    def take(self, ends: Sequence[StepEnd]) -> Mapping[int, Collection[str]]:
        """The output of a step has come, with a word of each worker that had one to say.

        Returns:
            Earlier steps whose output will not come any more, with the requests that they computed.
        """
        if not ends:
            return {}
        numbers = {end.step for end in ends}
        if len(numbers) == 1:
            self._taken |= numbers
            self._settled.update(dict.fromkeys(numbers, True))
        # Otherwise a rank has failed and vLLM mixes words of different steps, which count as lost.
        for end in ends:
            for step in end.unsettled:
                self._settled[step] = step in self._taken
            for steps in end.missed:
                sent = [self._sent[step] for step in self._sent if step in steps]
                self._again[steps] = Missed(
                    steps,
                    tuple(request for requests, _ in sent for request in requests),
                    tuple(job for _, abandoned in sent for job in abandoned),
                )
        oldest = min(min((end.step, *end.unsettled)) for end in ends)
        self._taken = {step for step in self._taken if step >= oldest}
        # Every worker has run this step, and one that had missed an earlier one has said so.
        run = min(numbers)
        missed = [steps for end in ends for steps in end.missed]
        self._sent = {
            step: sent
            for step, sent in self._sent.items()
            if step > run or any(step in steps for steps in missed)
        }
        over = [step for step in self._computing if step <= max(numbers)]
        lost = {step: self._computing.pop(step) for step in over}
        if len(numbers) == 1:
            lost.pop(run, None)
        return lost
