"""`mlgru_step` on Metal, in one launch for one position and in two for more."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import mlx.core as mx

from ..backend import launch
from ..backend.gradient import with_reference_gradient
from ..backend.self_check import kernel_fault
from ..linear_scan.metal_scan import CHUNK_STEPS, place_type
from . import Options, reference
from .metal_form import Form
from .metal_many import in_two_launches
from .metal_one import CHANNELS_PER_THREAD, in_one_launch

_Step = Callable[..., tuple[mx.array, mx.array]]


def unsupported(gates: mx.array, state: mx.array, weight: mx.array, options: Options) -> str | None:
    _, lower_bound, valid, starts = options
    if reason := launch.not_floats(gates, state, weight, lower_bound):
        return reason
    form, step = Form.of(options), _step(gates, options)
    given = {"lower_bound": lower_bound, "valid": valid, "starts": starts}
    dtypes: dict[str, Any] = {"gates": gates.dtype, "weight": weight.dtype} | {
        name: None if array is None else array.dtype for name, array in given.items()
    }
    run: Callable[..., Any] = partial(step, form)
    selected: dict[str, Any]
    if step is in_one_launch:
        # some sequences, of more than one SIMD group of threads
        kernel, batch, length, dims = "mlgru_step", 3, 1, 130
        selected = {"is_whole": state.shape[1] % CHANNELS_PER_THREAD == 0}
        dims += 2 * selected["is_whole"]
    else:
        # two chunks, of which the second is longer, of more than one SIMD group of channels
        kernel, batch, length = "mlgru_scan", 2, 2 * CHUNK_STEPS + 2
        dims = launch.SIMD_GROUP + 1
        selected = {"place": place_type((*gates.shape[:2], state.shape[1]))}
        run = partial(run, **selected)
    return kernel_fault(
        kernel,
        run,
        partial(_reference, form),
        partial(_check_inputs, batch, length, dims, **dtypes),
        **dtypes,
        **selected,
    )


def run(
    gates: mx.array, state: mx.array, weight: mx.array, options: Options
) -> tuple[mx.array, mx.array]:
    given = [array for array in options[1:] if array is not None]
    function = _differentiable(_step(gates, options), Form.of(options))
    y, last = function(gates, state, weight, *given)
    return y, last


def _step(gates: mx.array, options: Options) -> _Step:
    """What computes output and last state."""
    is_one = gates.shape[1] == 1 and options.starts is None
    return in_one_launch if is_one else in_two_launches


def _check_inputs(
    batch: int,
    length: int,
    dims: int,
    *,
    gates: mx.Dtype,
    weight: mx.Dtype,
    lower_bound: mx.Dtype | None,
    valid: mx.Dtype | None,
    starts: mx.Dtype | None,
) -> list[mx.array]:
    pattern = mx.arange(batch * length * 3 * dims)
    values = ((pattern * 37 % 101) / 25.0 - 2.0).reshape(batch, length, -1)
    state = ((pattern[: batch * dims] * 53 % 97) / 24.0 - 2.0).reshape(batch, dims)
    inputs = [values.astype(gates), state, (pattern[:dims] % 3 + 1.0).astype(weight)]
    places = pattern[: batch * length].reshape(batch, length)
    if lower_bound is not None:
        inputs.append((pattern[:dims] / dims).astype(lower_bound))
    if valid is not None:
        inputs.append((places % 5 != 1).astype(valid))
    if starts is not None:
        inputs.append((places % 7 == 3).astype(starts))
    return inputs


def _reference(form: Form, *arrays: mx.array) -> tuple[mx.array, mx.array]:
    (gates, state, weight), options = form.nested(arrays)
    return reference.run(gates, state, weight, options)


@cache
def _differentiable(step: _Step, form: Form) -> Callable[..., Any]:
    return with_reference_gradient(partial(step, form), partial(_reference, form))
