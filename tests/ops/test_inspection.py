"""The inspection checks every Metal kernel and keeps the reason of a broken one."""

import re
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.ops.backend import dispatch, launch, self_check
from mlx_mmfree.ops.inspection import kernel_texts, metal_kernels, operation_reports
from tests.emulator.emulator import Emulator


@pytest.fixture(autouse=True)
def nothing_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_checks", {})


@pytest.mark.metal
@pytest.mark.slow
def test_metal_kernels_pass_their_checks(metal: None) -> None:
    # other numbers of rows are computed in tests of values
    reports = operation_reports(rows=(1, 64))
    # an optimizer's step is left to MLX's own operations
    assert "metal" not in reports["adamw"]
    assert {report.get("metal") for report in reports.values()} == {None}
    checked = metal_kernels()
    assert set(checked.values()) == {None}
    for start in (
        "bit_linear(matrices=1, rows=1, outputs=4, are_halves=True, is_whole=True, gate=silu, ",
        "bit_linear(matrices=3, rows=1, outputs=4, are_halves=True, is_whole=True, gate=None, ",
        "bit_linear(matrices=1, rows=1, outputs=8, are_halves=True, is_whole=True, gate=None, ",
        "bit_linear(matrices=1, rows=1, outputs=4, are_halves=True, is_whole=False, gate=None, ",
        "half_denormals(",
        "bit_linear_tiles(matrices=1, rows=65, gate=silu, ",
        "bit_linear_split(matrices=1, rows=65, gate=silu, ",
        "gated_rms_norm(gate=bfloat16, ",
        "bit_linear(matrices=4, rows=1, outputs=4, are_halves=True, is_whole=True, gate=None, ",
        "linear_scan_forward(",
        "linear_scan_backward(",
        "mlgru_scan(gates=float16, ",
        "mlgru_step(gates=float16, ",
        "rms_norm_quantize(x=float32, norm=True, ",
        "rms_norm_quantize(x=float32, norm=False, ",
        "ternary_matmul_decode(",
        "ternary_matmul_prefill(rows=49, is_whole=True, parts=1, ",
        "ternary_matmul_prefill(rows=49, is_whole=True, parts=8, ",
    ):
        assert any(kernel.startswith(start) for kernel in checked), start


def _variant(name: str) -> tuple[str, ...]:
    """A kernel and the numbers that select its variant, without the types of its arrays."""
    kernel, *rest = re.split("__|_(?=b?float)", name.removeprefix("custom_kernel_"), maxsplit=1)
    numbers = [part for part in rest[0].split("_") if part.isdigit()]
    if re.fullmatch("gated_delta_rule_(head|channel)(_removal)?", kernel):
        # the second is the number of keys, of which the check takes the most
        del numbers[1]
    return kernel, *numbers


@pytest.mark.exhaustive
def test_every_variant_of_every_kernel_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[str, str] = {}

    def note(run: Any, reference: Any, inputs: Any) -> self_check._Finding:
        with launch.recording() as texts:
            run(*inputs)
        launched.update(texts)
        return self_check._Finding(None)

    monkeypatch.setenv("MLX_MMFREE_CACHE", "0")
    monkeypatch.setattr(dispatch, "metal_unavailable", lambda: None)
    monkeypatch.setattr(self_check, "_difference", note)
    steps = []
    operation_reports(progress=lambda *step: steps.append(step))
    written = {_variant(name) for name in kernel_texts()}
    assert {_variant(name) for name in launched} == written
    for matrices in range(1, 5):
        for rows in range(1, 5):
            start = f"bit_linear(matrices={matrices}, rows={rows}, outputs=4, are_halves=True, "
            assert any(kernel.startswith(start) for kernel in metal_kernels()), start
    # of all that was asked
    assert steps == [(n, len(steps)) for n in range(1, len(steps) + 1)]


@pytest.mark.exhaustive
def test_one_broken_kernel_is_the_reason(emulated: Emulator) -> None:
    emulated.edit = lambda text: text.replace("word < dims; word += 32", "word < dims; word += 31")
    with pytest.warns(RuntimeWarning, match="ternary_matmul_decode"):
        reports = operation_reports(rows=(1,))
    report = reports["ternary_matmul"]
    assert "it computes wrong values" in (report["metal"] or "")
    assert report["reference"] is None
    faults = metal_kernels()
    assert {"decode" in kernel for kernel, fault in faults.items() if fault} == {True}


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_without_metal_nothing_is_checked() -> None:
    found = {report["metal"] for report in operation_reports().values() if "metal" in report}
    assert found == {"no Metal device"}
    assert metal_kernels() == {}
