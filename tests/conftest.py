"""What every test shares."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from mlx_mmfree import native
from mlx_mmfree.ops.backend.choice import environment_candidate
from mlx_mmfree.ops.backend.dispatch import environment_backend, forget_candidates


def pytest_configure() -> None:
    """Sets up each process that runs tests, and what they start.

    Ctrl-C reaches what tests start, also where a shell runs them in the background. Nothing waits for
    the disk, since tests write files by the thousand, which need not outlive them. And compiled code of
    Python is kept: tests start hundreds of processes, each of which would compile the package anew.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.fsync = lambda handle: None
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def fused() -> None:
    """Lets `mx.compile` fuse operations on a CPU, as it does for users."""


@pytest.fixture(autouse=True)
def unfused(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fusing starts a C++ compiler, seconds a test, and has nothing to do with our operations."""
    if native.unavailable() or "fused" in request.fixturenames:
        yield
        return
    native.kernels().set_fusion(False)
    yield
    native.kernels().set_fusion(True)


@pytest.fixture(autouse=True)
def choices_of_the_environment() -> Iterator[None]:
    """A process reads its environment and its devices once; here each test has its own."""
    environment_backend.cache_clear()
    environment_candidate.cache_clear()
    forget_candidates()
    yield
    environment_backend.cache_clear()
    environment_candidate.cache_clear()
    forget_candidates()
