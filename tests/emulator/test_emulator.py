"""The emulator computes what small kernels say, and sees what Metal does not allow."""

from pathlib import Path

import mlx.core as mx
import pytest

from tests.emulator import emulator
from tests.emulator.emulator import Emulator, KernelError

if reason := emulator.unavailable():
    pytest.skip(reason, allow_module_level=True)

X = mx.arange(64, dtype=mx.float32)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("kernels"))


def launch(
    machine: Emulator, source: str, x: mx.array = X, dtype: mx.Dtype = mx.float32, **options: object
) -> mx.array:
    kernel = mx.fast.metal_kernel(
        name="trial", input_names=["x"], output_names=["out"], source=source
    )
    (out,) = machine.launch(
        kernel,
        inputs=[x],
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[dtype],
        **options,
    )
    return out


def test_counts_and_untouched_outputs(machine: Emulator) -> None:
    source = "uint n = thread_position_in_grid.x; if (n < 40) out[n] = 2 * x[n / 2];"
    out = launch(machine, source)
    assert mx.array_equal(out[:40], 2 * (mx.arange(40) // 2))
    assert mx.isnan(out[40:]).all()
    assert machine.records[-1].loaded["x"] == machine.records[-1].stored["out"] == 40 * 4
    assert mx.array_equal(launch(machine, source, init_value=7.0)[40:], mx.full((24,), 7.0))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.int8], ids=str)
def test_dtypes_and_small_inputs(machine: Emulator, dtype: mx.Dtype) -> None:
    x = mx.array([1, 2, 3]).astype(dtype)
    out = launch(
        machine, "uint n = thread_position_in_grid.x; out[n] = x[n % x_shape[0]];", x, dtype
    )
    assert mx.array_equal(out, mx.concatenate([x] * 22)[:64])


def test_operations_of_a_simd_group(machine: Emulator) -> None:
    source = """
        const uint n = thread_position_in_grid.x;
        out[n] = simd_sum(x[n]) + 10000.0f * simd_max(x[n]);
    """
    want = mx.repeat(X.reshape(2, 32).sum(axis=1) + 10000 * mx.array([31.0, 63.0]), 32)
    assert mx.array_equal(launch(machine, source), want)


@pytest.mark.parametrize("transpose", [False, True])
def test_product_of_matrices(machine: Emulator, transpose: bool) -> None:
    source = f"""
        threadgroup float left[64];
        threadgroup half right[64];
        const uint n = thread_position_in_grid.x;
        left[n] = x[n];
        right[n] = static_cast<half>(x[n]);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_matrix<float, 8, 8> a;
        simdgroup_matrix<half, 8, 8> b;
        simdgroup_matrix<float, 8, 8> sums = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
        simdgroup_load(a, left, 8);
        simdgroup_load(b, right, 8, 0, {str(transpose).lower()});
        simdgroup_multiply_accumulate(sums, a, b, sums);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simdgroup_index_in_threadgroup == 0) simdgroup_store(sums, left, 8);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[n] = left[n];
    """
    x = X.reshape(8, 8)
    want = x @ (x.T if transpose else x) + 1
    assert mx.array_equal(launch(machine, source), want.reshape(-1))


READ_OTHER = "threadgroup float a[64]; a[n] = x[n]; {} out[n] = a[n ^ {}];"
FAULTS = {
    "load before": ("out[n] = x[int(n) - 1];", "out of bounds: load of 4 bytes at byte -4 of 'x'"),
    "load after": ("out[n] = x[n + 1];", "out of bounds: load of 4 bytes at byte 256 of 'x'"),
    "store after": ("out[n + 1] = 0;", "out of bounds: store of 4 bytes at byte 256 of 'out'"),
    "store far": ("out[n * 100000] = 0;", "out of bounds: store"),
    "threadgroup array": ("threadgroup float a[8]; a[n] = 0; out[n] = 0;", "out of bounds"),
    "race of groups": (READ_OTHER.format("", 32), "no barrier lies in between"),
    "race of lanes": (READ_OTHER.format("", 1), "no barrier lies in between"),
    "wrong barrier": (
        READ_OTHER.format("simdgroup_barrier(mem_flags::mem_threadgroup);", 32),
        "no barrier lies in between",
    ),
    "lanes part": ("out[n] = n % 32 < 7 ? simd_sum(x[n]) : 0.0f;", "lanes of a SIMD group part"),
    "groups part": (
        "if (n < 32) threadgroup_barrier(mem_flags::mem_threadgroup); out[n] = 0;",
        "SIMD groups part",
    ),
    "address space": ("device float* p = x + n; out[n] = *p;", "does not compile"),
    "standard library": ("out[n] = std::max(x[n], 0.0f);", "does not compile"),
    "lambda": ("auto f = [&](float y) { return y; }; out[n] = f(x[n]);", "is not in Metal"),
    "double": ("double y = x[n]; out[n] = y;", "'double' is not in Metal"),
    "newer language": ("if constexpr (true) out[n] = 0;", "does not compile"),
    "ambiguous": ("out[n] = max(x[n], 0);", "does not compile"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported(machine: Emulator, name: str) -> None:
    source, message = FAULTS[name]
    with pytest.raises(KernelError, match=message):
        launch(machine, f"const uint n = thread_position_in_grid.x; {source}")


def test_barriers_order_accesses(machine: Emulator) -> None:
    for barrier, other in (("simdgroup", 1), ("threadgroup", 32)):
        source = READ_OTHER.format(f"{barrier}_barrier(mem_flags::mem_threadgroup);", other)
        out = launch(machine, f"const uint n = thread_position_in_grid.x; {source}")
        assert mx.array_equal(out, mx.array([int(n) ^ other for n in range(64)]))


def test_implicit_conversion_to_bfloat_is_refused(machine: Emulator) -> None:
    with pytest.raises(KernelError, match="does not compile"):
        launch(machine, "out[thread_position_in_grid.x] = 2.0f * x[0];", X, mx.bfloat16)


def test_compiled_kernels_are_kept(machine: Emulator) -> None:
    source = "out[thread_position_in_grid.x] = 3 * x[0];"
    launch(machine, source)
    folder: Path = machine._cache
    files = sorted(folder.iterdir())
    launch(machine, source)
    assert sorted(folder.iterdir()) == files
