"""Models, a Mooncake, and engine runs that several tests look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import models
import pytest
from kvprism.local_mooncake import LocalMooncake

FOLDER = Path(__file__).parents[2] / "build" / "vllm-models"


@pytest.fixture(scope="session", autouse=True)
def _vllm() -> None:
    pytest.importorskip("vllm", reason="make test-vllm installs it")


@pytest.fixture(scope="module")
def mooncake() -> Iterator[LocalMooncake]:
    """A pool of 1 GiB in a process of its own, so that it outlives engines."""
    with LocalMooncake(storage_bytes=1 << 30) as running:
        yield running


def model(name: str) -> Path:
    """A model, made when it is first asked for."""
    return models.build(name, FOLDER)
