"""The times of Metal kernels that the doctor reports; the emulator has no times worth reporting."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest

from mlx_mmfree.ops import kernel_times
from mlx_mmfree.ops.backend import choice, self_check
from tests.emulator.emulator import Emulator

KERNELS = {
    *(f"{op}, {way}" for op in ("bit_linear", "ternary_matmul") for way in choice.ON_METAL),
    *("plain_read", "rms_norm_quantize", "gated_rms_norm", "mlgru_step", "linear_scan"),
}


@pytest.fixture
def device(emulated: Emulator, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """A pass takes two seconds, and a plain read of all matrices half a second."""

    def two_seconds(build: Callable[[], Sequence[mx.array]]) -> float:
        mx.eval(build())
        return 2.0

    monkeypatch.setattr(self_check, "_checks", {})
    monkeypatch.setattr(kernel_times, "queued_seconds", two_seconds)
    monkeypatch.setattr(kernel_times, "read_seconds", lambda matrices: 0.5)
    return emulated


@pytest.mark.exhaustive
def test_each_kernel_is_timed_at_each_shape(device: Emulator) -> None:
    steps = []
    # two matrices of 8 rows of 2 words
    times = kernel_times.kernel_times(
        ((32, 8), (40, 8)), (1, 17), 128, lambda *step: steps.append(step)
    )
    assert steps == [(1, 2), (2, 2)]
    for rows in (1, 17):
        found = {time.kernel: time for time in times if (time.rows, time.inputs) == (rows, 32)}
        assert set(found) == KERNELS - ({"plain_read"} if rows > 1 else set())
        product = found["bit_linear, tiles"]
        assert (product.outputs, product.seconds, product.share_of_read) == (8, 1.0, 0.25)
        assert product.bytes_per_second == 2 * 64 / 2.0
        # halves, a float32 state, and codes and a scale in float32
        assert found["rms_norm_quantize"].bytes_per_second == (rows * 64 + 64 + rows * 132) / 2.0
        assert found["rms_norm_quantize"].share_of_read is None
    assert {time.kernel for time in times if time.inputs == 40} == KERNELS
    [read] = (time for time in times if time.kernel == "plain_read" and time.inputs == 32)
    assert (read.bytes_per_second, read.share_of_read) == (2 * 64 / 0.5, 1.0)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("way", "kernels"),
    [
        ("groups", {"bit_linear_1", "half_denormals", "ternary_matmul_decode"}),
        ("tiles", {"bit_linear_codes", "bit_linear_tiles_1", "ternary_matmul_prefill"}),
        ("split", {"bit_linear_codes", "bit_linear_tiles_1", "ternary_matmul_prefill"}),
        ("mlx", {"rms_norm_quantize"}),
    ],
)
def test_each_way_runs_its_kernels(
    device: Emulator, way: str, kernels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "ON_METAL", (way,))
    monkeypatch.setattr(kernel_times, "_others", lambda *_: [])
    kernel_times.kernel_times(((32, 8),), (17,), 1)
    launched = {record.kernel.removeprefix("custom_kernel_") for record in device.records}
    assert {
        name.split("__")[0].split("_float")[0].split("_uint")[0] for name in launched
    } == kernels


def test_what_is_switched_off_is_not_timed(device: Emulator) -> None:
    device.edit = lambda text: text.replace("sum = simd_sum(", "sum = (")
    with pytest.warns(RuntimeWarning, match="is switched off"):
        times = kernel_times.kernel_times(((32, 8),), (1,), 1)
    left_out = {"bit_linear, groups", "ternary_matmul, groups"}
    assert {time.kernel for time in times} == KERNELS - left_out


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_nothing_is_timed_without_metal() -> None:
    assert kernel_times.kernel_times() == []
