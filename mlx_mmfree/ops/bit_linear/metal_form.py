"""The arguments of the launches of `bit_linear`, and inputs that check its kernels."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from ..activations import Activation
from ..backend.self_check import packed_pattern
from ..rms_norm_quantize import Rounding
from ..ternary import packed_width
from . import Options, Projection

GATES: dict[Activation | None, int] = {None: 0, "silu": 1, "relu2": 2, "relu": 3}
"""The gates that the kernels compute."""


class Form(NamedTuple):
    """The arguments of a launch that are not arrays."""

    eps: float | None
    rounding: Rounding
    quantize: bool
    gate: Activation | None
    norm_eps: float | None
    has_residual: bool

    @classmethod
    def of(cls, options: Options) -> "Form":
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


@cache
def epsilons(norm_eps: float | None, eps: float | None) -> mx.array:
    return mx.array([norm_eps or 0.0, eps or 0.0])


def check_inputs(
    form: Form,
    rows: int,
    dims: int,
    outputs: Sequence[int],
    *,
    x: mx.Dtype,
    norm: mx.Dtype | None,
    residual: mx.Dtype | None,
    own_norm: mx.Dtype | None,
) -> list[mx.array]:
    """The arrays of a call with some outputs of each matrix; `dims` must be 255 at least."""
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
