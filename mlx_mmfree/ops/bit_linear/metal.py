"""`bit_linear` on Metal, in one launch for some tens of rows.

More rows are computed by the operations that it is made of. So are gates with the exact GELU and
matrices of fewer than 8 words, which the kernel does not take.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..activations import Activation
from ..backend import launch
from ..backend.gradient import with_reference_gradient
from ..backend.self_check import kernel_fault, packed_pattern
from ..rms_norm_quantize import Rounding
from ..ternary import packed_width
from . import Options, Projection, reference
from .metal_kernel import KERNELS, MAX_MATRICES, OUTPUTS, SIMD_GROUPS

_GATES: dict[Activation | None, int] = {None: 0, "silu": 1, "relu2": 2, "relu": 3}
# smaller arrays lie in another address space than the others
MIN_WORDS = 8


class _Form(NamedTuple):
    """The arguments of a launch that are not arrays."""

    eps: float | None
    rounding: Rounding
    quantize: bool
    gate: Activation | None
    norm_eps: float | None
    has_residual: bool

    @classmethod
    def of(cls, options: Options) -> "_Form":
        return cls(*options[:4], options.norm_eps, options.residual is not None)

    def flat(
        self,
        x: mx.array,
        projections: Sequence[Projection],
        norm: mx.array | None,
        residual: mx.array | None,
    ) -> list[mx.array]:
        """The arrays of a call."""
        arrays = [x, norm, residual, *(array for parts in projections for array in parts)]
        return [array for array in arrays if array is not None]

    def nested(
        self, arrays: Sequence[mx.array]
    ) -> tuple[mx.array, tuple[Projection, ...], mx.array | None, mx.array | None]:
        """Input, projections, norm and residual of the arrays of a call."""
        x, *rest = arrays
        norm = None if self.norm_eps is None else rest.pop(0)
        residual = rest.pop(0) if self.has_residual else None
        size = 2 if self.eps is None else 3
        projections = (Projection(*rest[n : n + size]) for n in range(0, len(rest), size))
        return x, tuple(projections), norm, residual


def unsupported(x: mx.array, projections: tuple[Projection, ...], options: Options) -> str | None:
    _, rounding, quantize, gate, norm, _, residual = options
    own_norms = [projection.norm for projection in projections]
    if reason := launch.not_floats(x, norm, residual, *own_norms):
        return reason
    if not _is_fused(x, projections, gate):
        return None
    form = _Form.of(options)
    rows = launch.rows_of_a_group(x.size // x.shape[-1])
    dtypes: dict[str, Any] = {
        "x": x.dtype,
        "norm": None if norm is None else norm.dtype,
        "residual": None if residual is None else residual.dtype,
        "own_norm": None if own_norms[0] is None else own_norms[0].dtype,
    }
    for matrices in {len(part) for part in _parts(projections)}:
        fault = kernel_fault(
            "bit_linear",
            partial(_fused, form),
            partial(_reference, form),
            partial(_check_inputs, form, rows, matrices, **dtypes),
            matrices=matrices,
            rows=rows,
            gate=gate,
            quantize=quantize,
            rounding=rounding,
            **dtypes,
        )
        if fault:
            return fault
    return None


def run(x: mx.array, projections: tuple[Projection, ...], options: Options) -> mx.array:
    product = _fused_product if _is_fused(x, projections, options.gate) else reference.run
    return product(x, projections, options)


def _fused_product(x: mx.array, projections: tuple[Projection, ...], options: Options) -> mx.array:
    """One launch for up to four matrices."""
    residual = options.residual
    form = _Form.of(options)
    function = _differentiable(form)
    results, start = [], 0
    for part in _parts(projections):
        stop = start + sum(weight.shape[0] for weight, *_ in part)
        added = residual if residual is None else residual[..., start:stop]
        results.append(function(*form.flat(x, part, options.norm, added)))
        start = stop
    return results[0] if len(results) == 1 else mx.concatenate(results, axis=-1)


def _is_fused(x: mx.array, projections: Sequence[Projection], gate: Activation | None) -> bool:
    return (
        gate in _GATES
        and 0 < x.size <= launch.FEW_ROWS * x.shape[-1]
        and all(weight.size >= MIN_WORDS for weight, *_ in projections)
    )


def _parts(projections: Sequence[Projection]) -> list[Sequence[Projection]]:
    return [projections[n : n + MAX_MATRICES] for n in range(0, len(projections), MAX_MATRICES)]


def _fused(form: _Form, *arrays: mx.array) -> mx.array:
    x, projections, norm, residual = form.nested(arrays)
    *leading, width = x.shape
    rows = x.size // width
    group_rows = launch.rows_of_a_group(rows)
    x = x.reshape(rows, width)
    outputs = [weight.shape[0] for weight, *_ in projections]
    # x stands in for what the kernel does not read
    inputs = [
        x,
        x if norm is None else norm,
        x if residual is None else residual.reshape(rows, sum(outputs)),
        _epsilons(form.norm_eps, form.eps),
    ]
    for weight, scale, own_norm in projections:
        inputs += [weight, scale, x if own_norm is None else own_norm]
    threads = launch.SIMD_GROUP * SIMD_GROUPS
    blocks = sum(-(-count // OUTPUTS) for count in outputs)
    (result,) = launch.launch(
        KERNELS[len(projections)],
        inputs=inputs,
        template=[
            ("T", x.dtype),
            ("ROWS", group_rows),
            ("GATE", _GATES[form.gate]),
            ("NORM", norm is not None),
            ("OWN_NORM", form.eps is not None),
            ("QUANTIZED", form.quantize),
            ("HALF_AWAY", form.rounding == "half_away"),
            ("RESIDUAL", residual is not None),
        ],
        grid=(threads * blocks, -(-rows // group_rows), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, sum(outputs))],
        output_dtypes=[x.dtype],
    )
    return result.reshape(*leading, sum(outputs))


@cache
def _epsilons(norm_eps: float | None, eps: float | None) -> mx.array:
    return mx.array([norm_eps or 0.0, eps or 0.0])


def _reference(form: _Form, *arrays: mx.array) -> mx.array:
    x, projections, norm, residual = form.nested(arrays)
    options = Options(*form[:4], norm, form.norm_eps, residual)
    return reference.run(x, projections, options)


@cache
def _differentiable(form: _Form) -> Callable[..., Any]:
    return with_reference_gradient(
        lambda *arrays: _fused(form, *arrays), lambda *arrays: _reference(form, *arrays)
    )


def _check_inputs(
    form: _Form,
    rows: int,
    matrices: int,
    *,
    x: mx.Dtype,
    norm: mx.Dtype | None,
    residual: mx.Dtype | None,
    own_norm: mx.Dtype | None,
) -> list[mx.array]:
    # a second slab, and a second threadgroup of the first matrix
    dims = 16 * (128 // rows if rows < 3 else 32) + 40
    outputs = [OUTPUTS + 1, *range(5, 4 + matrices)]
    # normed and scaled, these are whole numbers but for rounding errors, and none is near a tie
    values = ((mx.arange(rows * dims) * 37 % 255) - 127).astype(mx.float32).reshape(rows, dims)
    norms = [mx.arange(dims) % 2 + 1, mx.arange(dims) // 2 % 2 + 1]
    for dtype, weight in zip((norm, own_norm), norms, strict=True):
        values = values if dtype is None else values / weight
    if form.gate is not None:
        values = mx.concatenate([mx.full(values.shape, 2.0), values], axis=-1)
    added = (mx.arange(rows * sum(outputs)) % 7).reshape(rows, -1)
    projections = [
        Projection(
            packed_pattern(count, packed_width(dims)),
            mx.array([(1 + count) / 2048]),
            None if own_norm is None else norms[1].astype(own_norm),
        )
        for count in outputs
    ]
    return form.flat(
        values.astype(x),
        projections,
        None if norm is None else norms[0].astype(norm),
        None if residual is None else added.astype(residual),
    )
