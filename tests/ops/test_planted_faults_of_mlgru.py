"""The tests of the Metal kernels of MLGRU see faults planted into them one by one."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from tests.emulator.emulator import Emulator
from tests.ops.kernel_checks import (
    check_gated_norm,
    check_scan,
    check_scan_gradient,
    check_step,
    scan_inputs,
)
from tests.ops.planting import BARRIER, Fault, assert_seen


def scan() -> None:
    check_scan(*scan_inputs(2, 200, 37, mx.float32))


def scan_gradient() -> None:
    check_scan_gradient(*scan_inputs(2, 200, 37, mx.float32))


def step() -> None:
    check_step(3, 201, mx.float32)


def positions() -> None:
    # two chunks
    check_step(2, 40, mx.float32, length=130, has_starts=True)


def positions_output() -> None:
    check_step(2, 40, mx.float32, length=3)


def gated_norm() -> None:
    check_gated_norm(*mx.random.normal((2, 3, 301), key=mx.random.key(0)), mx.ones((301,)))


KERNELS = {
    scan: "linear_scan_forward",
    scan_gradient: "linear_scan_backward",
    step: "mlgru_step",
    positions: "mlgru_scan",
    positions_output: "gated_rms_norm",
    gated_norm: "gated_rms_norm",
}

FAULTS: dict[str, Fault] = {
    "scan: barrier": Fault(scan, BARRIER, "", 0),
    "scan: chunks before": Fault(scan, "c < chunk;", "c < chunk - 1;", 0),
    "scan: sum of a chunk": Fault(scan, "sum = gate * sum +", "sum = sum +", 0),
    "scan: channels beyond the last": Fault(scan, "channel < dims ? min(", "true ? min(", 0),
    "scan: last step": Fault(scan, "stop; t++", "stop - 1; t++", 1),
    "scan gradient: barrier": Fault(scan_gradient, BARRIER, "", 0),
    "scan gradient: state before": Fault(scan_gradient, "states[at - dims]", "states[at]", 0),
    "scan gradient: first step": Fault(scan_gradient, "t >= start", "t > start", 1),
    "scan gradient: chunks after": Fault(scan_gradient, "c > chunk;", "c >= chunk;", 0),
    "step: barrier": Fault(step, BARRIER, "", 0),
    "step: bound": Fault(step, "bound + (1.0f - bound) * f", "bound + f", 0),
    "step: mask": Fault(step, "stays ? old", "false ? old", 0),
    "step: mask of another row": Fault(step, "valid[row]", "valid[0]", 0),
    "step: epsilon left out": Fault(step, "dims) + eps", "dims)", 0),
    "step: forget gate of another index": Fault(step, "values + dims", "values + 2 * dims", 0),
    "step: old state": Fault(step, "f * old +", "old +", 0),
    "step: new value": Fault(step, "* (1.0f - f);", ";", 0),
    "step: last channel": Fault(step, "first + k < dims", "first + k + 1 < dims", 1),
    "positions: barrier": Fault(positions, BARRIER, "", 0),
    "positions: bound": Fault(positions, "bound + (1.0f - bound) * gate", "bound + gate", 0),
    "positions: bound of another channel": Fault(
        positions, "lower_bound[channel]", "lower_bound[0]", 0
    ),
    "positions: mask": Fault(positions, "if (MASKED &&", "if (false &&", 1),
    "positions: mask of a chunk's product": Fault(positions, "if (MASKED &&", "if (false &&", 0),
    "positions: value of a masked position": Fault(positions, "input = 0;", "", 1),
    "positions: starts": Fault(positions, "if (STARTS &&", "if (false &&", 1),
    "positions: starts at masked positions": Fault(positions, "gate = 1;", "", 1),
    "positions: index": Fault(positions, "valid[first_step + t]", "valid[first_step + t + 1]", 1),
    "positions: forget gate": Fault(positions, "gates[inputs + dims]", "gates[inputs]", 1),
    "positions: new value": Fault(positions, "* (1.0f - gate);", ";", 1),
    "positions: swish": Fault(positions, "candidate * sigmoid", "sigmoid", 1),
    "positions: state of another row": Fault(positions, "state[row]", "state[channel]", 0),
    "positions: last state": Fault(positions, "chunk + 1 == chunks", "chunk == 0", 0),
    "gated norm: gate after others": Fault(
        positions_output,
        "(row + 1) * gate_shape[1] - dims",
        "row * gate_shape[1]",
        0,
    ),
    "gated norm: barrier": Fault(gated_norm, BARRIER, "", 0),
    "gated norm: gate": Fault(gated_norm, "normed * value * sigmoid", "normed * sigmoid", 0),
    "gated norm: epsilon left out": Fault(gated_norm, "dims) + eps", "dims)", 0),
    "gated norm: last square": Fault(gated_norm, "first + k < dims", "first + k + 1 < dims", 0),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name: str, emulated: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    assert_seen(fault, KERNELS[fault.check], emulated, monkeypatch)


@pytest.mark.sample(2)
@pytest.mark.parametrize("check", KERNELS)
def test_without_faults_all_is_well(check: Callable[[], None], emulated: Emulator) -> None:
    check()
    assert emulated.records
