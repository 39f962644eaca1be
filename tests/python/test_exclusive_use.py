"""Objects for one call at a time tell a second thread so, instead of breaking."""

from __future__ import annotations

import threading
from collections.abc import Callable

import kvprism
import numpy as np
import pytest
from kvprism import sim
from store_helpers import projection

GROUPS = projection()


def search() -> tuple[Callable[[], object], Callable[[], object]]:
    finder = kvprism.HitSearch(GROUPS)
    hashes = 4096
    maps = np.ones(64 * len(finder.groups) * hashes, dtype=np.uint8)
    tokens = hashes * finder.unit

    def find(count: int) -> list[int]:
        part = maps[: count * len(finder.groups) * hashes]
        return finder.find_hits(part, hashes, locals=[0] * count, probed=[tokens] * count)

    return lambda: find(64), lambda: find(1)


def detector() -> tuple[Callable[[], object], Callable[[], object]]:
    rings = sim.RingDetector(GROUPS)
    data = np.zeros(64 << 20, dtype=np.uint8)
    return lambda: rings.count(data), lambda: rings.add([1, 2, 3])


@pytest.mark.parametrize(("made", "subject"), [(search, "hit search"), (detector, "ring detector")])
def test_a_second_thread_is_refused(
    made: Callable[[], tuple[Callable[[], object], Callable[[], object]]], subject: str
) -> None:
    long, short = made()
    expected = long()
    refused: set[str] = set()
    for _ in range(200):
        answers: list[object] = []

        def ask(answers: list[object] = answers) -> None:
            try:
                answers.append(long())
            except kvprism.ArgumentError as error:
                refused.add(str(error))

        thread = threading.Thread(target=ask)
        thread.start()
        while thread.is_alive():
            try:
                short()
            except kvprism.ArgumentError as error:
                refused.add(str(error))
        thread.join()
        assert answers in ([], [expected])
        if refused:
            break
    assert refused == {f"{subject}: thread = a second one: expected one call at a time"}
