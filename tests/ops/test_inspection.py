"""The inspection checks every Metal kernel and keeps the reason of a broken one."""

import mlx.core as mx
import pytest

from mlx_mmfree.ops.backend import self_check
from mlx_mmfree.ops.backend.inspection import metal_kernels, operation_reports
from tests.emulator.emulator import Emulator


@pytest.fixture(autouse=True)
def nothing_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_checks", {})


@pytest.mark.metal
def test_every_metal_kernel_is_checked(metal: None) -> None:
    reports = operation_reports()
    assert [report["metal"] for report in reports.values()] == [None] * len(reports)
    checked = metal_kernels()
    assert set(checked.values()) == {None}
    for start in (
        "bit_linear(matrices=1, rows=1, gate=silu, ",
        "bit_linear(matrices=3, rows=1, gate=None, ",
        "bit_linear_tiles(matrices=1, rows=65, gate=silu, ",
        "gated_rms_norm(gate=bfloat16, ",
        "linear_scan_forward(",
        "linear_scan_backward(",
        "mlgru_scan(gates=float16, ",
        "mlgru_step(gates=float16, ",
        "rms_norm_quantize(x=float32, norm=True, ",
        "rms_norm_quantize(x=float32, norm=False, ",
        "ternary_matmul_decode(",
        "ternary_matmul_prefill(",
    ):
        assert any(kernel.startswith(start) for kernel in checked), start


def test_one_broken_kernel_is_the_reason(emulated: Emulator) -> None:
    emulated.edit = lambda text: text.replace("word < dims; word += 32", "word < dims; word += 31")
    with pytest.warns(RuntimeWarning, match="ternary_matmul_decode"):
        reports = operation_reports()
    report = reports["ternary_matmul"]
    assert "it computes wrong values" in (report["metal"] or "")
    assert report["reference"] is None
    faults = metal_kernels()
    assert {"decode" in kernel for kernel, fault in faults.items() if fault} == {True}


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_without_metal_nothing_is_checked() -> None:
    assert all(report["metal"] == "no Metal device" for report in operation_reports().values())
    assert metal_kernels() == {}
