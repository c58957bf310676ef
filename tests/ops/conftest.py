"""Where Metal kernels run in the tests: on an Apple GPU where there is one, else in the emulator."""

import functools
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.ops.backend import choice, dispatch, launch, self_check, stored_results
from mlx_mmfree.ops.backend.gradient import assume_gradients
from mlx_mmfree.ops.backend.launch import CudaKernel
from tests import graph
from tests.backends import change_backend
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
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the backend `cuda` run, where there is no NVIDIA GPU by emulating its kernels as Metal's."""
    if dispatch.cuda_unavailable() is None:
        _keep_nothing(monkeypatch)
        return
    request.getfixturevalue("metal")
    emulate = launch.launch

    def run(kernel: Any, **call: Any) -> list[mx.array]:
        return emulate(as_metal(kernel) if isinstance(kernel, CudaKernel) else kernel, **call)

    monkeypatch.setattr(launch, "launch", run)
    monkeypatch.setattr(dispatch, "cuda_unavailable", lambda: None)


@functools.cache
def as_metal(kernel: CudaKernel) -> Any:
    """A Metal kernel that does what the text of a CUDA kernel says."""
    words = {
        "__shared__": "threadgroup",
        "__syncthreads()": "threadgroup_barrier(mem_flags::mem_threadgroup)",
        " ::min(": " min(",
    }
    source = kernel.source
    for cuda, metal in words.items():
        source = source.replace(cuda, metal)
    indices = """
    const uint3 threadIdx = {
        simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup, 0, 0};
    const uint3 blockIdx = threadgroup_position_in_grid;
    const uint3 blockDim = {simdgroups_per_threadgroup * 32, 1, 1};
    """
    return mx.fast.metal_kernel(name=f"cuda_{kernel.name}", source=indices + source, **kernel.text)


@pytest.fixture
def traced() -> Iterator[None]:
    """Gradients are traced, as the backend `metal` sees it. Where there is no Metal, MLX cannot tell."""
    with assume_gradients(True):
        yield


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the backend `chunked` run on a CPU too."""
    change_backend(monkeypatch, "linear_scan", "chunked", only_on=None)


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
    monkeypatch.setattr(stored_results, "_sections", {})


def _kernel_cache(request: pytest.FixtureRequest) -> Path:
    """Where compiled kernels are stored from run to run, or for this run without pytest's cache."""
    if cache := getattr(request.config, "cache", None):
        return cache.mkdir("metal_emulator")
    folder = request.getfixturevalue("tmp_path_factory").getbasetemp() / "metal_emulator"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the backend `metal` build graphs of stand-ins, of what is chosen without timing."""
    build_stand_ins(monkeypatch)


def build_stand_ins(patch: pytest.MonkeyPatch) -> None:
    """Does so as long as the patch lasts."""
    patch.setenv(choice.ENVIRONMENT_VARIABLE, choice.DEFAULT)
    patch.setattr(dispatch, "metal_unavailable", lambda: None)
    patch.setattr(dispatch, "native_unavailable", lambda: "it is left out")
    patch.setattr(launch, "launch", _launch)
    patch.setattr(self_check, "kernel_fault", lambda *args, **kwargs: None)
    for name in ("rope", "rms_norm"):
        patch.setattr(mx.fast, name, getattr(graph, name))
    patch.setattr(mx.fast, "scaled_dot_product_attention", graph.attention)
    patch.setattr(mx, "dequantize", graph.dequantize)


def _launch(
    kernel: Any, *, inputs: Any, output_shapes: Any, output_dtypes: Any, **options: Any
) -> list[mx.array]:
    return graph.stand_in(output_shapes, output_dtypes, *inputs)
