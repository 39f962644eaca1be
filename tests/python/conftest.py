"""What every test may rely on."""

import os
import signal
from collections.abc import Iterator

import pytest
from children import Children

# Mooncake reads it when its library is opened for the first time, by whichever test that is.
os.environ["MC_LOG_LEVEL"] = "ERROR"


@pytest.fixture(scope="session", autouse=True)
def signals_as_in_a_terminal() -> None:
    """A run in the background inherits ignored signals, and would hand them on to its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def children() -> Iterator[Children]:
    """Whatever becomes of the test, its processes end."""
    owned = Children()
    try:
        yield owned
    finally:
        owned.end()
