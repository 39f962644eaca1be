"""What every test may rely on."""

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def signals_as_in_a_terminal() -> None:
    """A run in the background inherits ignored signals, and would hand them on to its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
