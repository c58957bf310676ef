r"""`bit_linear` for the few rows of decoding where the library's kernels cannot run.

On a CPU each of MLX's operations costs more than its arithmetic for one row, so this is the definition
in as few of them as there are. The mean squares of both norms are one weighted sum,

.. math::
    r^{-2} = \mathrm{mean}\big((w^2 + \epsilon_p)\,u^2\big) + \epsilon\,\epsilon_p
    \quad\text{with}\quad \mathrm{RMSNorm}_p(\mathrm{RMSNorm}(u)) = r\,w\,w_p\,u ,

and matrices that share their codes, or have as many outputs, are multiplied together. Sums of codes
are exact in float32.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..activations import Activation, gated
from ..backend.compilation import fold
from ..backend.dispatch import use_backend
from ..backend.gradient import with_reference_gradient
from ..rms_norm_quantize import Rounding
from ..rms_norm_quantize.reference import BELOW_HALF
from ..unpacked import FEW_ROWS, unpacked_matrices
from . import Projection, reference


def unsupported(
    x: mx.array,
    projections: tuple[Projection, ...],
    eps: float | None,
    rounding: Rounding,
    quantize: bool,
    gate: Activation | None,
    norm: mx.array | None,
    norm_eps: float | None,
    residual: mx.array | None,
) -> str | None:
    if mx.default_device() != mx.Device(mx.cpu):
        return "the default device is not the CPU"
    if x.size > FEW_ROWS * x.shape[-1]:
        return f"there are more than {FEW_ROWS} rows"
    dims = x.shape[-1] // 2 if gate else x.shape[-1]
    for group in _groups(projections):
        if unpacked_matrices().find([projection.weight for projection in group], dims) is None:
            return "there is no room for the weights as floats"
    return None


def run(
    x: mx.array,
    projections: tuple[Projection, ...],
    eps: float | None,
    rounding: Rounding,
    quantize: bool,
    gate: Activation | None,
    norm: mx.array | None,
    norm_eps: float | None,
    residual: mx.array | None,
) -> mx.array:
    optional = [norm, residual, *(projection.norm for projection in projections)]
    arrays = [x, *(projection.scale for projection in projections)]

    def as_function(compute: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def function(*given: mx.array) -> mx.array:
            rest = iter(given)
            x = next(rest)
            scales = [next(rest) for _ in projections]
            norm, residual, *norms = (None if each is None else next(rest) for each in optional)
            return compute(
                x,
                tuple(
                    Projection(projection.weight, scale, own)
                    for projection, scale, own in zip(projections, scales, norms, strict=True)
                ),
                eps=eps,
                rounding=rounding,
                quantize=quantize,
                gate=gate,
                norm=norm,
                norm_eps=norm_eps,
                residual=residual,
            )

        return function

    function = with_reference_gradient(as_function(_compute), as_function(_definition))
    y: mx.array = function(*arrays, *(each for each in optional if each is not None))
    return y


def _definition(*args: Any, **kwargs: Any) -> mx.array:
    with use_backend("reference"):
        return reference.run(*args, **kwargs)


def _groups(projections: tuple[Projection, ...]) -> list[tuple[Projection, ...]]:
    """Those that one product computes: all, or each alone."""
    first = projections[0]
    if first.norm is None or all(p.weight.shape == first.weight.shape for p in projections):
        return [projections]
    return [(projection,) for projection in projections]


def _compute(
    x: mx.array,
    projections: tuple[Projection, ...],
    *,
    eps: float | None,
    rounding: Rounding,
    quantize: bool,
    gate: Activation | None,
    norm: mx.array | None,
    norm_eps: float | None,
    residual: mx.array | None,
) -> mx.array:
    # (P, B, R, D) are the axes: sets of codes, blocks of outputs, rows, inputs
    u = x.astype(mx.float32).reshape(1, 1, -1, x.shape[-1])
    if gate is not None:
        u = gated(u, gate)
    inverse = _inverse_norm(u, norm, norm_eps, eps)
    parts = [
        _product(u, inverse, group, norm, rounding, quantize) for group in _groups(projections)
    ]
    if len(parts) > 1:
        parts = [mx.concatenate([part.reshape(u.shape[2], -1) for part in parts], axis=-1)]
    y = parts[0].reshape(*x.shape[:-1], -1)
    return (y if residual is None else y + residual).astype(x.dtype)


def _inverse_norm(
    u: mx.array, norm: mx.array | None, norm_eps: float | None, eps: float | None
) -> mx.array | None:
    """`r`, `(1, 1, R, 1)`; `None` without norms."""
    rows, dims = u.shape[2:]
    if norm is not None and norm_eps is not None and eps is not None:
        weight, offset = (norm.astype(mx.float32).square() + eps) / dims, norm_eps * eps
    else:
        either = norm_eps if eps is None else eps
        if either is None:
            return None
        weight, offset = mx.full((dims,), 1 / dims), either
    weight, added = weight.reshape(1, 1, dims, 1), mx.full((1, 1, 1, 1), offset)
    fold(weight, added)
    if rows == 1:
        return mx.rsqrt(u.square() @ weight + added)
    # one by one, as a row alone
    return mx.rsqrt(u.square().swapaxes(1, 2) @ weight + added).swapaxes(1, 2)


def _product(
    u: mx.array,
    inverse: mx.array | None,
    projections: tuple[Projection, ...],
    norm: mx.array | None,
    rounding: Rounding,
    quantize: bool,
) -> mx.array:
    """The scaled products of one group, of the size of `(R, N)`."""
    rows, dims = u.shape[2:]
    weight = _norm_weight(norm, projections)
    y = u if weight is None else u * weight
    sets = y.shape[0]
    blocks, factor = _blocks(projections, sets, dims), _factor(projections, sets)
    if factor.size > sets:
        factor = factor.reshape(sets, -1, 1, blocks.shape[-1])
    fold(blocks, factor)
    if quantize:
        codes, scale = _codes(y, inverse, rounding)
        factor = factor / scale
    else:
        codes = y if inverse is None else y * inverse
    products = (codes @ blocks) * factor
    return products if rows == 1 else products.transpose(2, 0, 1, 3).reshape(rows, -1)


def _norm_weight(norm: mx.array | None, projections: tuple[Projection, ...]) -> mx.array | None:
    """`w w_p`, `(P, 1, 1, D)`, or with a common one for all `(1, 1, 1, D)`; `None` without norms."""
    norms = [p.norm.astype(mx.float32) for p in projections if p.norm is not None]
    if not norms:
        if norm is None:
            return None
        norms = [norm.astype(mx.float32)]
    elif norm is not None:
        norms = [own * norm for own in norms]
    weight = mx.stack(norms).reshape(len(norms), 1, 1, -1)
    fold(weight)
    return weight


def _blocks(projections: tuple[Projection, ...], sets: int, dims: int) -> mx.array:
    """The trits for each set of codes, `(P, B, D, C)`."""
    floats = unpacked_matrices().find([projection.weight for projection in projections], dims)
    assert floats is not None
    return floats.blocks.reshape(sets, -1, *floats.blocks.shape[1:])


def _factor(projections: tuple[Projection, ...], sets: int) -> mx.array:
    """The scales of the matrices, one for each set, `(P, 1, 1, 1)`, or one for each output."""
    scales = [projection.scale for projection in projections]
    if len(scales) == sets and all(scale.size == 1 for scale in scales):
        return mx.concatenate(scales).reshape(sets, 1, 1, 1)
    return mx.concatenate(
        [
            mx.broadcast_to(scale, projection.weight.shape[:1])
            for scale, projection in zip(scales, projections, strict=True)
        ]
    )


def _codes(y: mx.array, inverse: mx.array | None, rounding: Rounding) -> tuple[mx.array, mx.array]:
    """The codes of `r y`, as `rms_norm_quantize` rounds them, and their scale `(P, 1, R, 1)`."""
    sizes = mx.abs(y)
    largest = mx.max(sizes, axis=-1, keepdims=True)
    if inverse is not None:
        largest = largest * inverse
    # of the shapes they meet: MLX broadcasts in an operation of its own
    least, most = mx.full(largest.shape, 1e-5), mx.full(largest.shape, 127.0)
    below_half = mx.full(y.shape, BELOW_HALF)
    fold(least, most, below_half)
    scale = most / mx.maximum(largest, least)
    step = scale if inverse is None else scale * inverse
    if rounding == "half_even":
        return mx.round(y * step), scale
    return mx.sign(y) * mx.floor(sizes * step + below_half), scale
