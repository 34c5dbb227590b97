"""A count of the faults that were tried, printed at the end, and what tests of them share."""

import contextlib
import gc
import sys
from collections.abc import Iterator

import pytest

from tests.training.conftest import compiled_once, traced_once, unbroken

__all__ = ["compiled_once", "traced_once", "unbroken"]


class Faults:
    """How many faults of each kind were tried, and how many did no harm.

    No harm is a right recovery, or an error that names the thing and loses nothing.
    """

    def __init__(self) -> None:
        self.tried: dict[str, int] = {}
        self.survived: dict[str, int] = {}

    @contextlib.contextmanager
    def __call__(self, kind: str, times: int = 1) -> Iterator[None]:
        """Counts faults that the body tries and checks; survived are those it leaves normally."""
        self.tried[kind] = self.tried.get(kind, 0) + times
        yield
        self.survived[kind] = self.survived.get(kind, 0) + times


_FAULTS = pytest.StashKey[Faults]()


@pytest.fixture(scope="session")
def fault(pytestconfig: pytest.Config) -> Faults:
    """`with fault("kind"):` around each fault that a test tries."""
    return pytestconfig.stash.setdefault(_FAULTS, Faults())


@pytest.fixture
def abandoned_reads(monkeypatch):
    """Collects the reads that Orbax abandons: if one of its parallel reads fails, it drops all."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    yield
    gc.collect()


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    faults = config.stash.get(_FAULTS, None)
    if faults is None or not faults.tried:
        return
    terminalreporter.section("faults")
    terminalreporter.line(f"{'tried':>7}{'survived':>10}{'lost':>6}  fault")
    for kind, tried in faults.tried.items():
        survived = faults.survived.get(kind, 0)
        terminalreporter.line(f"{tried:>7}{survived:>10}{tried - survived:>6}  {kind}")
