"""Projections that share one input, with what lies around them, and heads side by side."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ..ops import bit_linear, gated, gated_activation, linear_product
from ..ops.activations import Activation
from .arguments import check_features
from .bit_linear import PackedBitLinear
from .norms import apply_norm
from .sharded_linear import ShardedToAllBitLinear


def split_heads(x: mx.array, num_heads: int) -> mx.array:
    """`(B, L, H * K)` as `(B, H, L, K)`."""
    return mx.unflatten(x, -1, (num_heads, -1)).swapaxes(1, 2)


def merge_heads(x: mx.array) -> mx.array:
    """`(B, H, L, K)` as `(B, L, H * K)`."""
    return mx.flatten(x.swapaxes(1, 2), 2)


def one_hot_values(batch_size: int, num_heads: int, length: int) -> mx.array:
    """The values for which a sum of weighted values is the weights, float32 `(B, H, N, N)`."""
    return mx.broadcast_to(mx.eye(length), (batch_size, num_heads, length, length))


def project(
    x: mx.array,
    linears: Sequence[nn.Module],
    *,
    gate: Activation | None = None,
    norm: nn.Module | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    r"""Applies several linears to one input.

    .. math::
        y = \big[\mathrm{linear}_p(\mathrm{norm}(u))\big]_p + r

    with `u` the input or, with a gate, :math:`a(x_{..D}) \odot x_{D..}`. Packed ternary linears are
    computed in one operation, in float32; others one by one.

    Args:
        x: `(..., D)`, or gate and up halves `(..., 2D)` with `gate`.
        linears: Modules that take `(..., D)`.
        gate: The activation of the gate half.
        norm: Applied before the linears.
        residual: Added to the result.

    Returns:
        The results, one behind the other in the last axis, in the dtype of `x`.

    Raises:
        ValueError: The input does not fit a linear.

    Example:
        >>> gate, up = nn.Linear(8, 4), nn.Linear(8, 4)
        >>> project(mx.ones((1, 3, 8)), [gate, up]).shape
        (1, 3, 8)
    """
    first = linears[0]
    if _is_fused(linears, norm):
        check_features("BitLinear", x, first.input_dims if gate is None else 2 * first.input_dims)
        return bit_linear(
            x,
            [linear.projection for linear in linears],
            gate=gate,
            norm=None if norm is None else norm["weight"],
            norm_eps=None if norm is None else norm.eps,
            residual=residual,
            **first.activations,
        )
    dtype = x.dtype
    if len(linears) == 1 and isinstance(first, ShardedToAllBitLinear):
        return first.project(x, gate=gate, norm=norm, residual=residual)
    if gate is not None:
        x = gated(x, gate)
    if norm is not None:
        x = apply_norm(norm, x)
    if len(linears) == 1:
        y = apply_linear(first, x)
    elif _are_one_product(linears, x):
        y = linear_product(x, mx.concatenate([linear["weight"] for linear in linears]))
    else:
        y = mx.concatenate([apply_linear(linear, x) for linear in linears], axis=-1)
    return (y if residual is None else residual + y).astype(dtype)


def project_apart(
    x: mx.array, linears: Sequence[nn.Module], *, norm: nn.Module | None = None
) -> tuple[mx.array, ...]:
    """As `project`, but without copying results to lie side by side.

    Args:
        x: `(..., D)`.
        linears: Modules that take `(..., D)`.
        norm: Applied before the linears.

    Returns:
        The result of each linear, or where one operation computes them, the one that holds them all.

    Example:
        >>> gate, up = nn.Linear(8, 4), nn.Linear(8, 4)
        >>> [part.shape for part in project_apart(mx.ones((1, 3, 8)), [gate, up])]
        [(1, 3, 4), (1, 3, 4)]
    """
    if len(linears) == 1 or _is_fused(linears, norm) or _are_one_product(linears, x):
        return (project(x, linears, norm=norm),)
    dtype = x.dtype
    if norm is not None:
        x = apply_norm(norm, x)
    return tuple(apply_linear(linear, x).astype(dtype) for linear in linears)


def project_gated(
    parts: tuple[mx.array, ...],
    linear: nn.Module,
    gate: Activation,
    *,
    norm: nn.Module | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    r"""Applies a linear to gated values.

    .. math::
        y = \mathrm{linear}(\mathrm{norm}(a(g) \odot u)) + r

    Args:
        parts: :math:`g` and :math:`u`, as `project_apart` returns them for the gate and what it gates.
        linear: Takes `(..., D)`.
        gate: The activation `a`.
        norm: Applied before the linear.
        residual: Added to the result, :math:`r`.

    Returns:
        `(..., N)` in the dtype of the parts.

    Example:
        >>> gate, up, down = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 8)
        >>> parts = project_apart(mx.ones((1, 3, 8)), [gate, up])
        >>> project_gated(parts, down, "silu").shape
        (1, 3, 8)
    """
    if len(parts) == 1 or _is_fused((linear,), norm):
        x = parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=-1)
        return project(x, (linear,), gate=gate, norm=norm, residual=residual)
    values, ups = parts
    y = project(gated_activation(values, ups, gate), (linear,), norm=norm, residual=residual)
    return y.astype(values.dtype)


def apply_linear(linear: nn.Module, x: mx.array) -> mx.array:
    """`linear(x)`, where the gradient of a plain weight is laid out as the weight is."""
    if type(linear) is nn.Linear:
        return linear_product(x, linear["weight"], linear.get("bias"))
    y: mx.array = linear(x)
    return y


def _is_fused(linears: Sequence[nn.Module], norm: nn.Module | None) -> bool:
    if norm is not None and type(norm) is not nn.RMSNorm:
        return False
    for linear in linears:
        if type(linear) is not PackedBitLinear or "bias" in linear:
            return False
        if linear.activations != linears[0].activations:
            return False
    return True


def _are_one_product(linears: Sequence[nn.Module], x: mx.array) -> bool:
    """Whether the matrices are joined: with more rows than columns, they are less to copy than the
    results, and the input is arranged for one product only.
    """
    return _are_plain(linears) and x.size > x.shape[-1] ** 2


def _are_plain(linears: Sequence[nn.Module]) -> bool:
    """Whether all are matrices of floats of one dtype, and nothing else."""
    dtypes = {linear["weight"].dtype for linear in linears if type(linear) is nn.Linear}
    return len(dtypes) == 1 and not any(
        type(linear) is not nn.Linear or "bias" in linear for linear in linears
    )
