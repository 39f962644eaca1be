"""Models that the tests share."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
from filelock import FileLock

FOLDER = Path(__file__).parents[2] / "build" / "vllm-models"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "soak: takes long; make soak-vllm runs it")
    config.addinivalue_line("markers", "xdist_group(name): shares a fixture; one process runs them")


@pytest.fixture(scope="session", autouse=True)
def _vllm() -> None:
    pytest.importorskip("vllm", reason="make test-vllm installs it")


def model(name: str) -> Path:
    """A model, made when it is first asked for."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / f"{name}.lock"):
        return models.build(name, FOLDER)
