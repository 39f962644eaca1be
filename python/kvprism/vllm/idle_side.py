"""The scheduler's half of an instance that neither loads nor saves."""

from __future__ import annotations

from typing import Any

from .cache_config import Described
from .metadata import StageMetadata, StepMetadata
from .stats import StoreStats


class IdleSide:
    """Answers as a SchedulerSide that has nothing to do: its cache need not be storable."""

    def learn(self, described: Described, stages: tuple[StageMetadata, ...]) -> None:
        """Nothing is named, so nothing has to agree."""

    def bind_pool(self, pool: Any) -> None:
        """No job holds a block."""

    def lookup(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Nothing is found."""
        return 0, False

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Nothing was offered."""

    def end_step(self, output: Any) -> StepMetadata:
        """A step without jobs."""
        return StepMetadata()

    def new_request(self, request: Any) -> None:
        """Nothing is known of requests."""

    def finished(self, request: Any) -> None:
        """Nothing is known of requests."""

    def save_last_states(
        self, request: Any, tables: tuple[list[int], ...], offers: list[tuple[int, int, int]]
    ) -> None:
        """Nothing is saved."""

    def take_output(self, output: Any) -> None:
        """Workers tell nothing."""

    def take_events(self) -> list[Any]:
        """Nothing happens."""
        return []

    def take_stats(self) -> StoreStats | None:
        """Nothing is counted."""
        return None

    def counters(self) -> dict[str, int | dict[str, int]]:
        """Nothing is counted."""
        return {}

    def pending_work(self) -> bool:
        """Nothing is under way."""
        return False

    def purge(self) -> None:
        """The objects are those of others."""

    def close(self) -> None:
        """Nothing is open."""
