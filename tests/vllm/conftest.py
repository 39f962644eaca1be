"""Models and versions of vLLM that the tests share."""

from __future__ import annotations

import os
from pathlib import Path

import models
import pytest
import versions
from filelock import FileLock

FOLDER = Path(__file__).parents[2] / "build" / "vllm-models"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "soak: takes long; make soak-vllm runs it")
    config.addinivalue_line("markers", "xdist_group(name): shares a fixture; one process runs them")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Names the groups where xdist 3.8 cannot: since pytest 9.2 an id is not where it writes it.

    Otherwise every process would make the fixtures of every group, which are the engines.
    """
    if not config.getoption("loadgroup", False):
        return
    for item in items:
        names = sorted({mark.args[0] for mark in item.iter_markers("xdist_group")})
        ending = "@" + "_".join(names)
        if names and not item.nodeid.endswith(ending):
            item._id = item.id.parse(item.nodeid + ending)


@pytest.fixture(scope="session", autouse=True)
def _vllm() -> None:
    pytest.importorskip("vllm", reason="make test-vllm installs it")


def model(name: str) -> Path:
    """A model, made when it is first asked for."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / f"{name}.lock"):
        return models.build(name, FOLDER)


def version(name: str) -> Path:
    """A folder with another version of vLLM; without it a test fails, unless that was allowed."""
    try:
        return versions.folder(name)
    except versions.UnavailableError as error:
        if os.environ.get("KVPRISM_WITHOUT_VERSIONS") == "1":
            pytest.skip(f"cannot be fetched: {error}")
        pytest.fail(f"cannot be fetched, and KVPRISM_WITHOUT_VERSIONS is not 1: {error}")
