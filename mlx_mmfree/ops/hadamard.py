"""The signed Walsh-Hadamard transform of blocks, by which weights are rotated."""

from collections.abc import Iterator

import mlx.core as mx

from .backend.dispatch import Example, Operation
from .float_dtypes import FLOATS

MAX_BLOCK = 2**13


def hadamard(
    x: mx.array, block: int, signs: mx.array | None = None, *, inverse: bool = False
) -> mx.array:
    r"""Multiplies by signs and transforms each block, or undoes both.

    .. math::
        y = \frac{1}{\sqrt{n}} H_n (s \odot x), \qquad
        x = s \odot \frac{1}{\sqrt{n}} H_n\, y, \qquad
        H_1 = 1, \quad H_{2n} = \begin{pmatrix} H_n & H_n \\ H_n & -H_n \end{pmatrix}

    for each of the consecutive blocks of `n` numbers of the last axis. That is a rotation: lengths and
    products of rows stay. Computed in float32.

    Source: Sylvester's construction; as a rotation of weights, QuIP# (Tseng et al., arXiv 2402.04396).

    Args:
        x: `(..., D)`, any float dtype.
        block: `n`, a power of two from 2 to 8192 that divides `D`.
        signs: `s`, float32 `(D,)`, each 1 or -1; `None`: all are 1.
        inverse: The second formula instead of the first.

    Returns:
        `(..., D)` in the dtype of `x`.

    Raises:
        ValueError: The block is no power of two within its bounds, or a shape or dtype does not fit.

    Example:
        >>> y = hadamard(mx.array([1.0, 2.0, 3.0, 4.0]), 4, mx.array([1.0, -1.0, 1.0, 1.0]))
        >>> y.tolist()
        [3.0, 1.0, -4.0, 2.0]
    """
    if type(block) is not int or not 2 <= block <= MAX_BLOCK or block & (block - 1):
        raise ValueError(
            f"[hadamard] 'block' must be a power of two from 2 to {MAX_BLOCK} but got {block!r:.40}."
        )
    if x.ndim < 1 or x.shape[-1] % block or x.dtype not in FLOATS:
        raise ValueError(
            f"[hadamard] 'x' must be floats (..., D), D a multiple of {block}, but got {x.dtype} with "
            f"shape {x.shape}."
        )
    if signs is not None and (signs.shape != x.shape[-1:] or signs.dtype != mx.float32):
        raise ValueError(
            f"[hadamard] 'signs' must be float32 of shape {x.shape[-1:]} but got {signs.dtype} with "
            f"shape {signs.shape}."
        )
    if x.size == 0:
        return x
    y: mx.array = _operation(x, signs, block, inverse)
    return y


def _reference(x: mx.array, signs: mx.array | None, block: int, inverse: bool) -> mx.array:
    """The definition, step by step over blocks of twice the size."""
    y = x.astype(mx.float32)
    if signs is not None and not inverse:
        y = y * signs
    size = 1
    while size < block:
        a, b = mx.split(y.reshape(*x.shape[:-1], -1, 2, size), 2, axis=-2)
        y = mx.concatenate([a + b, a - b], axis=-2).reshape(x.shape)
        size *= 2
    y = y * block**-0.5
    if signs is not None and inverse:
        y = y * signs
    return y.astype(x.dtype)


def _examples() -> Iterator[Example]:
    for dtype in FLOATS:
        for block in (64, 512):
            x = mx.zeros((1, block), dtype)
            yield Example((x, mx.ones((block,)), block, False))
        yield Example((x, None, 512, True))


_operation = Operation("hadamard", _examples, reference=_reference)
