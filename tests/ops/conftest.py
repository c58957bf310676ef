"""Where Metal kernels run in the tests: on an Apple GPU where there is one, else in the emulator."""

import functools
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_mmfree.ops.backend import choice, dispatch, kept_results, launch
from mlx_mmfree.ops.linear_scan import chunked as scan_chunked
from tests.emulator import emulator

STRICT = "MLX_MMFREE_STRICT_EMULATOR"
"""Folder of a module `emu` with more checks, whose `run` takes the arguments of `launch`."""


@pytest.fixture
def metal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the backend `metal` run; every process checks the kernels anew, and times nothing."""
    _keep_nothing(monkeypatch)
    if dispatch.metal_unavailable() is None:
        yield
        return
    seed = zlib.crc32(request.node.nodeid.encode())
    if folder := os.environ.get(STRICT):
        monkeypatch.setattr(sys, "path", [folder, *sys.path])
        import emu

        options = emu.Options(partial="error", seed=seed)
        monkeypatch.setattr(launch, "launch", functools.partial(emu.run, options=options))
    else:
        emulated: emulator.Emulator = request.getfixturevalue("emulated")
        emulated.seed = seed
    monkeypatch.setattr(dispatch, "metal_unavailable", lambda: None)
    yield


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the backend `chunked` run on a CPU too."""
    monkeypatch.setattr(scan_chunked, "ONLY_ON", None)


@pytest.fixture
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> emulator.Emulator:
    """Lets the backend `metal` run in the emulator."""
    if reason := emulator.unavailable():
        pytest.skip(reason)
    _keep_nothing(monkeypatch)
    machine = emulator.Emulator(_kernel_cache(request))
    monkeypatch.setattr(dispatch, "metal_unavailable", lambda: None)
    monkeypatch.setattr(launch, "launch", machine.launch)
    return machine


def _keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_MMFREE_CACHE", "0")
    monkeypatch.setenv(choice.ENVIRONMENT_VARIABLE, choice.DEFAULT)
    monkeypatch.setattr(kept_results, "_kept", {})


def _kernel_cache(request: pytest.FixtureRequest) -> Path:
    """Where compiled kernels are kept from run to run, or for this run without pytest's cache."""
    if cache := getattr(request.config, "cache", None):
        return cache.mkdir("metal_emulator")
    folder = request.getfixturevalue("tmp_path_factory").getbasetemp() / "metal_emulator"
    folder.mkdir(exist_ok=True)
    return folder
