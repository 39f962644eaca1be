"""What passes between the scheduler's and the workers' connector, pickled by vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True)
class StageMetadata(KVConnectorHandshakeMetadata):
    """What a pipeline stage holds, told once at start: by its workers to the scheduler, and by the
    scheduler, as it takes it to be, to every worker."""

    groups: tuple[int, ...]
    """Indices of the KV cache groups that it has layers of, ascending."""
    fingerprint: str
    """Of its keys; empty where keys have none."""
    meaning: Mapping[str, Any] | None = None
    """From a worker: what its bytes mean. Models change vLLM's configuration while they are loaded,
    and a scheduler in another process has it as it was before."""
    facts: tuple[tuple[str, str], ...] = ()
    """From a worker: what its projection's digest covers. Plans of another digest are refused, so
    an engine whose ranks see other facts must not start."""


@dataclass(frozen=True, slots=True)
class Missed:
    """What a worker has to tell in place of steps whose metadata it never had."""

    steps: range
    requests: tuple[str, ...] = ()
    """That wait for a load of theirs."""
    abandoned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepEnd:
    """A worker's word in the output of a step."""

    step: int
    unsettled: tuple[int, ...] = ()
    """Earlier steps in which it told of loads, and has not heard whether vLLM took their output."""
    missed: tuple[range, ...] = ()
    """Steps whose metadata it never had, and has not heard of."""


@dataclass(frozen=True, slots=True)
class StepMetadata(KVConnectorMetadata):
    """One engine step, from the scheduler to every worker."""

    plan: bytes = b""
    """The encoded StepPlan, which carries its own version; empty when there is no job."""
    loads: tuple[tuple[int, str], ...] = ()
    """Job and request of each load in the plan: workers report loads by vLLM's request ids."""
    refused: tuple[str, ...] = ()
    """Requests that wait for a load which was never planned: each worker reports them failed."""
    abandoned: tuple[int, ...] = ()
    """Jobs of loads in quarantine: each worker reports them failed."""
    stages: tuple[StageMetadata, ...] = ()
    """Of several pipeline stages, by rank: what each is taken to hold; in the first step."""
    fresh_since: int = 0
    """The first step since a reset has emptied vLLM's own cache: one that failed before it keeps
    nothing back."""
    step: int = 0
    """Its number, rising by one; 0: none, and nothing is told of it."""
    answer: bool = False
    """Workers tell that the step has ended."""
    settled: tuple[tuple[int, bool], ...] = ()
    """Steps, and whether vLLM has taken their output: what was told in others is told again where
    the engine has one rank."""
    missed: tuple[Missed, ...] = ()
    """For workers that have said that they missed these."""


@dataclass(slots=True)
class ReportMetadata(KVConnectorWorkerMetadata):
    """Reports of one or several workers, one behind the other."""

    reports: bytes
    ends: tuple[StepEnd, ...] = ()
    """Of the step in whose output this is, one of each worker that has to hear of it."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReportMetadata:
        """Concatenates: reports carry their rank and are never summed."""
        if not isinstance(other, ReportMetadata):
            raise TypeError(f"cannot aggregate with {type(other).__name__}")
        return ReportMetadata(self.reports + other.reports, self.ends + other.ends)
