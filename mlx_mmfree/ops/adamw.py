"""A step of the optimizer AdamW for one parameter."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from .backend.dispatch import Backend, Example, Operation, native_kernel


def adamw(
    parameter: mx.array,
    gradient: mx.array,
    m: mx.array,
    v: mx.array,
    factors: mx.array,
    *,
    betas: tuple[float, float],
    eps: float,
) -> tuple[mx.array, mx.array, mx.array]:
    r"""Updates a parameter and its moments.

    .. math::
        m' = \beta_1 m + (1 - \beta_1)\,g, \quad v' = \beta_2 v + (1 - \beta_2)\,g^2, \quad
        w' = a\,w - \frac{b\,m'}{c \sqrt{v'} + \epsilon}

    Source: decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), with the arithmetic of
    `mlx.optimizers.AdamW`. It has no gradient.

    Args:
        parameter: :math:`w`, float32 `(...)`.
        gradient: :math:`g`, of the same shape and dtype.
        m: The first moment, of the same shape and dtype.
        v: The second moment, of the same shape and dtype.
        factors: :math:`a, b, c`, which hold learning rate, weight decay and bias correction, float32
            `(3,)`.
        betas: :math:`\beta_1, \beta_2`.
        eps: :math:`\epsilon`.

    Returns:
        :math:`w', m', v'`.

    Example:
        >>> w, g, zero = mx.array([1.0]), mx.array([0.5]), mx.array([0.0])
        >>> factors = mx.array([0.99, 0.1, 1.0])
        >>> w, m, v = adamw(w, g, zero, zero, factors, betas=(0.5, 0.75), eps=0.0)
        >>> round(w.item(), 4), m.item(), v.item()
        (0.89, 0.25, 0.0625)
    """
    updated: tuple[mx.array, mx.array, mx.array] = _operation(
        parameter, gradient, m, v, factors, betas, eps
    )
    return updated


def reference(
    parameter: mx.array,
    gradient: mx.array,
    m: mx.array,
    v: mx.array,
    factors: mx.array,
    betas: tuple[float, float],
    eps: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """The definition in plain operations."""
    (b1, b2), (decay, numerator, denominator) = betas, factors
    m = b1 * m + (1 - b1) * gradient
    v = b2 * v + (1 - b2) * mx.square(gradient)
    return parameter * decay - numerator * m / (mx.sqrt(v) * denominator + eps), m, v


def native(*arguments: Any) -> tuple[mx.array, mx.array, mx.array]:
    """One pass in C++ that changes arrays in place where nothing else holds them.

    A gradient may lie in memory as a transposed matrix does.
    """
    *arrays, betas, eps = arguments
    updated: tuple[mx.array, mx.array, mx.array] = _kernel()(*arrays, *betas, eps)
    return updated


def _unsupported(*arguments: Any) -> str | None:
    for array in arguments[:4]:
        if array.dtype != mx.float32:
            return f"an argument is {array.dtype}"
    return None


def _examples() -> Iterator[Example]:
    x = mx.zeros((32,))
    yield Example((x, x, x, x, mx.ones((3,)), (0.9, 0.95), 1e-8))


_kernel = native_kernel("adamw")
# on a GPU the step is left to MLX's own operations
_operation = Operation(
    "adamw", _examples, native=Backend(native, _unsupported), reference=reference
)
