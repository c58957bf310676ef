"""Settings and fixtures of every test."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlx_mmfree import native
from mlx_mmfree.files import plugins
from mlx_mmfree.ops.backend.choice import environment_candidate
from mlx_mmfree.ops.backend.dispatch import environment_backend, forget_candidates


def pytest_configure() -> None:
    """Sets up each process that runs tests, and what they start.

    Ctrl-C reaches what tests start, also where a shell runs them in the background. Nothing waits for
    the disk, since tests write files by the thousand, which need not outlive them. Compiled code of
    Python is kept: tests start hundreds of processes, each of which would compile the package anew. And
    what MLX and those processes put into the temporary directory lies in a folder of its own.
    """
    tempfile.gettempdir()  # pytest's own folders stay where they are looked for
    os.environ["TMPDIR"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["TMPDIR"], ignore_errors=True)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.fsync = lambda handle: None
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST = ("readme/test_commands.py", "tests/test_examples.py", "fuzz/test_fuzz.py")
"""Ends of the paths of the files that take longest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, so that no process has one of them alone when the others end."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST))


def pytest_collection_finish() -> None:
    """Tells the garbage collector to look no more at what stays until the end, such as the tests."""
    gc.collect()
    gc.freeze()


def machine_code() -> set[Path]:
    """The files that MLX compiled for operations that it fuses on a CPU."""
    return {*Path(os.environ["TMPDIR"]).glob("mlx/*/cpu/*")}


@pytest.fixture
def fused() -> Callable[[], set[Path]]:
    """For tests that let MLX compile, as `mx.compile` of users does; lists what it compiled."""
    return machine_code


@pytest.fixture
def unfused() -> Iterator[None]:
    """For tests that call `mx.compile` themselves: fusing starts a C++ compiler, seconds a test."""
    if native.unavailable():
        yield
        return
    native.kernels().set_fusion(False)
    yield
    native.kernels().set_fusion(True)


@pytest.fixture(autouse=True)
def compiles_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test, and no process that it starts, may let MLX compile machine code.

    MLX loads it from a folder of the temporary directory whose name anybody can take first.
    """
    before = machine_code()
    yield
    if not {"fused", "unfused"} & {*request.fixturenames}:
        assert machine_code() <= before


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


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test, or an example of the documentation, leaves no plug-in to those after it."""
    before = set(sys.modules)
    monkeypatch.setattr(plugins, "LOADED", [])
    monkeypatch.setattr(plugins, "_roots", {})
    yield
    for name in sys.modules.keys() - before:
        if name.startswith("plugin_"):
            del sys.modules[name]
