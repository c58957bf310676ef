"""The scan and its gradient as a GPU computes them, against a definition in float64.

Where there is no NVIDIA GPU, the text of the CUDA kernels runs in the emulator of Metal, and clang
compiles it for such a GPU.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.ops import linear_scan, use_backend
from mlx_mmfree.ops.backend import self_check
from mlx_mmfree.ops.backend.dispatch import FLOATS
from mlx_mmfree.ops.backend.launch import CudaKernel
from mlx_mmfree.ops.linear_scan import cuda_kernels
from tests.emulator import compiler
from tests.ops.kernel_checks import scan_inputs
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

KERNELS = [cuda_kernels._forward, cuda_kernels._backward]
# what the library of CUDA declares
DECLARATIONS = """
    typedef unsigned long size_t;
    struct uint3 { unsigned x, y, z; };
    extern __attribute__((device)) const uint3 threadIdx, blockIdx, blockDim;
    #define __global__ __attribute__((global))
    #define __shared__ __attribute__((shared))
    #define __syncthreads() asm volatile("bar.sync 0;" ::: "memory")
    __attribute__((device)) inline int min(int a, int b) { return a < b ? a : b; }
"""

Arrays = list[np.ndarray]


@pytest.fixture(
    params=[*(pytest.param(name, marks=pytest.mark.metal) for name in ("metal", "cuda")), "chunked"]
)
def backend(request: pytest.FixtureRequest) -> str:
    request.getfixturevalue(request.param)
    return request.param


def scanned(f: np.ndarray, i: np.ndarray, state: np.ndarray) -> np.ndarray:
    states = np.empty_like(f)
    for step in range(f.shape[1]):
        state = states[:, step] = f[:, step] * state + i[:, step]
    return states


def scan_gradients(
    f: np.ndarray, i: np.ndarray, state: np.ndarray, of_states: np.ndarray, of_last: np.ndarray
) -> Arrays:
    """The gradients of `sum(of_states * states) + sum(of_last * last)`."""
    before = np.concatenate([state[:, None], scanned(f, i, state)[:, :-1]], axis=1)
    of_f, of_i, carried = np.empty_like(f), np.empty_like(f), of_last
    for step in reversed(range(f.shape[1])):
        of_i[:, step] = of_states[:, step] + carried
        of_f[:, step] = of_i[:, step] * before[:, step]
        carried = f[:, step] * of_i[:, step]
    return [of_f, of_i, carried]


def cotangents(f: mx.array) -> list[mx.array]:
    batch, _, dims = f.shape
    keys = mx.random.split(mx.random.key(3))
    return [mx.random.normal(f.shape, key=keys[0]), mx.random.normal((batch, dims), key=keys[1])]


def in_float64(arrays: Any) -> Arrays:
    return [np.array(array.astype(mx.float32), np.float64) for array in arrays]


def test_the_gradient_of_the_definition_is_that_of_finite_differences() -> None:
    f, i, state, *given = in_float64([*(a := scan_inputs(2, 7, 3, mx.float32)), *cotangents(a[0])])

    def loss(arrays: Arrays) -> float:
        states = scanned(*arrays)
        return float((given[0] * states).sum() + (given[1] * states[:, -1]).sum())

    inputs, step = [f, i, state], 1e-6
    for which, gradient in enumerate(scan_gradients(f, i, state, *given)):
        for index in np.ndindex(gradient.shape):
            moved = []
            for sign in (1, -1):
                arrays = [array.copy() for array in inputs]
                arrays[which][index] += sign * step
                moved.append(loss(arrays))
            assert np.isclose((moved[0] - moved[1]) / (2 * step), gradient[index], rtol=1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 3), (1, 63, 5), (2, 100, 33), (1, 8192, 3)], ids=str)
def test_values_and_gradients(shape: tuple[int, int, int], dtype: mx.Dtype, backend: str) -> None:
    inputs = scan_inputs(*shape, dtype)
    given = cotangents(inputs[0])
    with use_backend(backend):
        (states, last), gradients = mx.vjp(linear_scan, [*inputs], given)
    f, i, state = in_float64(inputs)
    want = scanned(f, i, state)
    # states are float32, whatever the gates are
    for got, exact in ((states, want), (last, want[:, -1])):
        assert got.dtype == mx.float32
        assert relative_error(got, mx.array(exact.astype(np.float32))) <= TOLERANCE[mx.float32]
    exact_gradients = scan_gradients(f, i, state, *in_float64(given))
    for x, got, exact in zip(inputs, gradients, exact_gradients, strict=True):
        assert (got.dtype, got.shape) == (x.dtype, x.shape)
        wanted = mx.array(exact.astype(np.float32))
        assert relative_error(got, wanted) <= max(GRADIENT_TOLERANCE, TOLERANCE[x.dtype])


def test_a_wrong_cuda_kernel_is_switched_off(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_checks", {})
    wrong = KERNELS[0].source.replace("value = gate * value + input", "value = gate * value")
    monkeypatch.setattr(
        cuda_kernels,
        "_forward",
        CudaKernel("wrong_scan", wrong, **KERNELS[0].text),
    )
    with pytest.warns(RuntimeWarning, match="The kernel linear_scan_forward.* is switched off"):
        reason = cuda_kernels.unsupported(*scan_inputs(1, 3, 2, mx.float32))
    assert reason is not None and "it computes wrong values" in reason


@pytest.mark.skipif(
    compiler.unavailable() is not None, reason="clang comes with the package ziglang"
)
@pytest.mark.parametrize("type_", ["float", "_Float16", "__bf16"])
@pytest.mark.parametrize("index", ["unsigned", "size_t"])
def test_the_cuda_kernels_compile(type_: str, index: str, tmp_path: Path) -> None:
    text = f"{DECLARATIONS}typedef {index} Place;"
    for kernel in KERNELS:
        parameters = []
        for name in kernel.text["input_names"]:
            parameters.append(f"const {type_ if name in 'fi' else 'float'}* {name}")
            if f"{name}_shape" in kernel.source:
                parameters.append(f"const int* {name}_shape")
        parameters += [f"float* {name}" for name in kernel.text["output_names"]]
        text += f"__global__ void {kernel.name}({', '.join(parameters)}) {{{kernel.source}}}\n"
    file, compiled = tmp_path / "kernels.cu", tmp_path / "kernels.ptx"
    file.write_text(text)
    flags = (
        "--cuda-device-only -nocudainc -nocudalib --cuda-gpu-arch=sm_80 -Wno-unknown-cuda-version"
    )
    compiler.zig("clang", "-x", "cuda", *flags.split(), "-S", "-o", str(compiled), str(file))
    assert compiled.read_text().count(".entry") == len(KERNELS)
    # nothing is left in Metal's words
    assert "threadgroup" not in text and "simdgroup" not in text


def test_cuda_kernels_have_names_of_their_own_for_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build(*, name: str, **text: Any) -> Any:
        built.append(name)
        return lambda **call: []

    monkeypatch.setattr(mx.fast, "cuda_kernel", build)
    kernel = CudaKernel("scan", "", input_names=["f", "i"], output_names=["states"])
    for dtype in (mx.float16, mx.float32, mx.float16):
        kernel(inputs=[mx.zeros(1, dtype), mx.zeros(1)])
        kernel(inputs=[mx.zeros(1, dtype)], template=[("Place", mx.uint64)])
    assert built == [
        *("scan_float16_float32", "scan_float16_uint64"),
        *("scan_float32_float32", "scan_float32_uint64"),
    ]
