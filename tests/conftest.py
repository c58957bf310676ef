"""Settings and fixtures of every test."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from zlib import crc32

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run every test with every set of parameters, not the usual ones alone",
    )


def usual(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those that run unless `--exhaustive` is given.

    Tests marked `exhaustive` are left out. Of a test marked `sample(count, of=parameter)` there are
    `count` sets of parameters, for each value of the parameter if one is named. They are spread evenly,
    from a start that differs from test to test.
    """
    groups: dict[tuple[str, str], list[pytest.Function]] = {}
    chosen = {*items}
    for item in items:
        sample = item.get_closest_marker("sample")
        if item.get_closest_marker("exhaustive") is not None:
            chosen.discard(item)
        elif sample is not None and isinstance(item, pytest.Function):
            value = item.callspec.params[sample.kwargs["of"]] if "of" in sample.kwargs else ""
            test = item.nodeid.partition("[")[0]
            groups.setdefault((test, str(getattr(value, "name", value))), []).append(item)
    for (test, _), group in groups.items():
        sample = group[0].get_closest_marker("sample")
        assert sample is not None
        count = min(sample.args[0], len(group))
        first = crc32(test.encode()) % len(group)
        some = {(first + n * len(group) // count) % len(group) for n in range(count)}
        chosen -= {item for n, item in enumerate(group) if n not in some}
    return [item for item in items if item in chosen]


LONGEST = ("readme/test_commands.py", "tests/test_examples.py", "fuzz/test_fuzz.py")
"""Ends of the paths of the files that take longest."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is exhaustive, unless it is asked for or tests are named one by one.

    The longest files come first, so that no process has one of them alone when the others end.
    """
    if not config.getoption("exhaustive") and not any("::" in each for each in config.args):
        chosen = usual(items)
        config.hook.pytest_deselected(items=list({*items} - {*chosen}))
        items[:] = chosen
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
