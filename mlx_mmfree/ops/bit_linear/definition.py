r"""The arguments of `bit_linear`, its definition by other operations, and its gradient.

The definition for few rows is for decoding where the library's kernels cannot run. On a CPU, each of
MLX's operations costs more than its arithmetic for one row. It is the definition in as few operations
as give the same bits. Matrices that share their codes, or have the same number of outputs, are
multiplied together, and what depends on weights alone is computed once. Sums of codes are exact in
float32.

The gradient on a GPU takes a dense product of 16-bit numbers for each matrix. The quantiser of
activations is straight-through, and its scale cancels out. The gradient of what meets a matrix
:math:`m T` is :math:`m\,(g\,T)`, where `g` is the result's gradient. Trits and `g` are numbers of the
dtype of `x` already, so that nothing is rounded before the product.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import mlx.core as mx

from ..activations import Activation, gated
from ..backend.compilation import fold
from ..backend.dispatch import use_backend
from ..backend.gradient import with_reference_gradient
from ..rms_norm_quantize import BELOW_HALF, Rounding, normed, rms_norm_quantize
from ..ternary_matmul import ternary_matmul
from ..ternary_matmul.definition import unpacked_trits
from ..unpacked import FEW_ROWS, unpacked_matrices


class Projection(NamedTuple):
    """One ternary matrix.

    Attributes:
        weight: Packed trits, `uint32` of shape `(N, packed_width(D))`, see `ops.ternary`.
        scale: float32, `(1,)` or one for each output, `(N,)`.
        norm: Scale of the RMSNorm of this projection, `(D,)`, or `None` for no norm.

    Example:
        >>> weight, scale = ternarize_packed(mx.array([[0.5, -0.5], [0.0, 1.0]]))
        >>> bit_linear(mx.array([2.0, 4.0]), [Projection(weight, scale)], quantize=False).tolist()
        [-1.0, 2.0]
    """

    weight: mx.array
    scale: mx.array
    norm: mx.array | None = None


class Options(NamedTuple):
    """The options that `bit_linear` hands on to its backends beside the input and the projections."""

    eps: float | None = None
    rounding: Rounding = "half_even"
    quantize: bool = True
    gate: Activation | None = None
    norm: mx.array | None = None
    norm_eps: float | None = None
    residual: mx.array | None = None


def shared_input(x: mx.array, options: Options) -> mx.array:
    """The input of all projections: the input after its gate and norm, float32."""
    z = x.astype(mx.float32)
    if options.gate is not None:
        z = gated(z, options.gate)
    if options.norm is not None and options.norm_eps is not None:
        z = mx.fast.rms_norm(z, options.norm.astype(mx.float32), options.norm_eps)
    return z


def reference(x: mx.array, projections: tuple[Projection, ...], options: Options) -> mx.array:
    """The definition."""
    eps, rounding, quantize, *_, residual = options
    z = shared_input(x, options)
    results = []
    codes: mx.array | None = None
    for weight, scale, own_norm in projections:
        if quantize:
            # without norms of their own all projections share their codes
            if codes is None or own_norm is not None:
                codes, input_scale = rms_norm_quantize(z, own_norm, eps=eps, rounding=rounding)
            results.append(ternary_matmul(codes, weight, codes=True) * (scale / input_scale))
        else:
            normed = z
            if own_norm is not None and eps is not None:
                normed = mx.fast.rms_norm(z, own_norm.astype(mx.float32), eps)
            results.append(ternary_matmul(normed, weight) * scale)
    y = results[0] if len(results) == 1 else mx.concatenate(results, axis=-1)
    return (y if residual is None else y + residual).astype(x.dtype)


def chunked_unsupported(
    x: mx.array, projections: tuple[Projection, ...], options: Options
) -> str | None:
    if x.size > FEW_ROWS * x.shape[-1]:
        return f"there are more than {FEW_ROWS} rows"
    dims = x.shape[-1] // 2 if options.gate else x.shape[-1]
    for group in _groups(projections):
        if unpacked_matrices().find([projection.weight for projection in group], dims) is None:
            return "there is no space for the weights as floats"
    return None


def chunked(x: mx.array, projections: tuple[Projection, ...], options: Options) -> mx.array:
    optional = [options.norm, options.residual, *(projection.norm for projection in projections)]
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
                options._replace(norm=norm, residual=residual),
            )

        return function

    function = with_reference_gradient(as_function(_compute), as_function(_definition))
    y: mx.array = function(*arrays, *(each for each in optional if each is not None))
    return y


def _definition(x: mx.array, projections: tuple[Projection, ...], options: Options) -> mx.array:
    with use_backend("reference"):
        return reference(x, projections, options)


def _groups(projections: tuple[Projection, ...]) -> list[tuple[Projection, ...]]:
    """Groups of projections that one product computes, which are all of them or each alone."""
    first = projections[0]
    if first.norm is None or all(p.weight.shape == first.weight.shape for p in projections):
        return [projections]
    return [(projection,) for projection in projections]


def _compute(x: mx.array, projections: tuple[Projection, ...], options: Options) -> mx.array:
    eps, rounding, quantize, gate, norm, norm_eps, residual = options
    # the axes (P, B, R, D) are sets of codes, blocks of outputs, rows and inputs
    u = x.astype(mx.float32).reshape(1, 1, -1, x.shape[-1])
    if gate is not None:
        u = gated(u, gate)
    if norm is not None and norm_eps is not None:
        weight = mx.broadcast_to(norm.astype(mx.float32), u.shape)
        fold(weight)
        u = _normed(u, norm_eps) * weight
    normed = u if eps is None else _normed(u, eps)
    parts = [_product(normed, group, rounding, quantize) for group in _groups(projections)]
    if len(parts) > 1:
        parts = [mx.concatenate([part.reshape(u.shape[2], -1) for part in parts], axis=-1)]
    y = parts[0].reshape(*x.shape[:-1], -1)
    return (y if residual is None else y + residual).astype(x.dtype)


def _normed(u: mx.array, eps: float) -> mx.array:
    """`u` over the root of its mean square, as `mx.fast.rms_norm` computes it."""
    # of the shapes that they meet, because MLX broadcasts in an operation of its own
    shape = (*u.shape[:-1], 1)
    share, added = mx.full(shape, 1 / u.shape[-1]), mx.full(shape, eps)
    fold(share, added)
    return u * mx.rsqrt(u.square().sum(axis=-1, keepdims=True) * share + added)


def _product(
    u: mx.array, projections: tuple[Projection, ...], rounding: Rounding, quantize: bool
) -> mx.array:
    """The scaled products of one group, `R * N` numbers, of inputs normed without the norm's weight."""
    rows, dims = u.shape[2:]
    norms = [p.norm.astype(mx.float32) for p in projections if p.norm is not None]
    if norms:
        weight = mx.stack(norms).reshape(-1, 1, 1, dims)
        fold(weight)
        u = u * weight
    sets = u.shape[0]
    blocks, factor = _blocks(projections, sets, dims), _factor(projections, sets)
    if factor.size > sets:
        factor = factor.reshape(sets, -1, 1, blocks.shape[-1])
    fold(blocks, factor)
    if quantize:
        u, scale = _codes(u, rounding)
        factor = factor / scale
    products = (u @ blocks) * factor
    return products if rows == 1 else products.transpose(2, 0, 1, 3).reshape(rows, -1)


def _blocks(projections: tuple[Projection, ...], sets: int, dims: int) -> mx.array:
    """The trits for each set of codes, `(P, B, D, C)`."""
    floats = unpacked_matrices().find([projection.weight for projection in projections], dims)
    assert floats is not None
    return floats.blocks.reshape(sets, -1, *floats.blocks.shape[1:])


def _factor(projections: tuple[Projection, ...], sets: int) -> mx.array:
    """The scales of the matrices: one for each set, `(P, 1, 1, 1)`, or one for each output."""
    scales = [projection.scale for projection in projections]
    if len(scales) == sets and all(scale.size == 1 for scale in scales):
        return mx.concatenate(scales).reshape(sets, 1, 1, 1)
    return mx.concatenate(
        [
            mx.broadcast_to(scale, projection.weight.shape[:1])
            for scale, projection in zip(scales, projections, strict=True)
        ]
    )


def _codes(y: mx.array, rounding: Rounding) -> tuple[mx.array, mx.array]:
    """The codes of `y`, as `rms_norm_quantize` rounds them, and their scale `(P, 1, R, 1)`."""
    sizes = mx.abs(y)
    largest = mx.max(sizes, axis=-1, keepdims=True)
    least, most = mx.full(largest.shape, 1e-5), mx.full(largest.shape, 127.0)
    below_half = mx.full(y.shape, BELOW_HALF)
    fold(least, most, below_half)
    scale = most / mx.maximum(largest, least)
    if rounding == "half_even":
        return mx.round(y * scale), scale
    return mx.sign(y) * mx.floor(sizes * scale + below_half), scale


class Variant(NamedTuple):
    """The arguments of a launch that are not arrays."""

    eps: float | None
    rounding: Rounding
    quantize: bool
    gate: Activation | None
    norm_eps: float | None
    has_residual: bool

    @classmethod
    def of(cls, options: Options) -> "Variant":
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


_Run = Callable[[mx.array, tuple[Projection, ...], Options], mx.array]


def with_dense_gradient(run: Callable[..., mx.array], variant: Variant) -> Callable[..., Any]:
    """A function of the arrays of a call with the values of `run` and a fast gradient.

    Args:
        run: Computes the result from the arrays, in the order of `Variant.flat`.
        variant: The rest of the call.
    """
    return with_reference_gradient(run, partial(defined, variant), partial(_gradients, variant))


def defined(variant: Variant, *arrays: mx.array) -> mx.array:
    """The definition as a function of the arrays of a call."""
    return _called(reference, variant, arrays)


def _called(run: _Run, variant: Variant, arrays: Sequence[mx.array]) -> mx.array:
    x, projections, norm, residual = variant.nested(arrays)
    return run(x, projections, Options(*variant[:4], norm, variant.norm_eps, residual))


def _gradients(
    variant: Variant,
    inputs: Sequence[mx.array],
    cotangents: Sequence[mx.array],
    outputs: Sequence[mx.array],
) -> tuple[mx.array, ...]:
    def gradients(run: _Run, indices: list[int]) -> dict[int, mx.array]:
        def function(*changed: mx.array) -> mx.array:
            arrays = list(inputs)
            for index, array in zip(indices, changed, strict=True):
                arrays[index] = array
            return _called(run, variant, arrays)

        found = mx.vjp(function, [inputs[index] for index in indices], list(cotangents))[1]
        return dict(zip(indices, found, strict=True))

    # indices instead of arrays
    at: Any = variant.nested(cast(Any, range(len(inputs))))
    weights, scales, _ = zip(*at[1], strict=True)
    others = [n for n in range(len(inputs)) if n not in (*weights, *scales)]
    # a scale's needs the codes, and is not computed where it is frozen, as packed matrices are
    found = gradients(_dense, others) | gradients(reference, list(scales))
    return tuple(found.get(n, x) for n, x in enumerate(inputs))


def _dense(x: mx.array, projections: tuple[Projection, ...], options: Options) -> mx.array:
    """Has the gradient of `bit_linear`, except for the scales'. Its values are not computed."""
    z = shared_input(x, options)
    results = []
    for weight, scale, own_norm in projections:
        y = normed(z, own_norm, options.eps)
        trits = unpacked_trits(weight, z.shape[-1], x.dtype)
        if scale.size == 1:
            y = y * scale
        else:
            trits = trits * scale[:, None].astype(x.dtype)
        results.append(y.astype(x.dtype) @ trits.T)
    y = mx.concatenate(results, axis=-1)
    return (y if options.residual is None else y + options.residual).astype(x.dtype)


def cuda(x: mx.array, projections: tuple[Projection, ...], options: Options) -> mx.array:
    """Plain operations, with dense products for the gradient."""
    variant = Variant.of(options)
    y: mx.array = _function(variant)(*variant.flat(x, projections, options.norm, options.residual))
    return y


@cache
def _function(variant: Variant) -> Callable[..., Any]:
    return with_dense_gradient(partial(defined, variant), variant)
