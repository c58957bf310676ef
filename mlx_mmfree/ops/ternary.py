"""Ternary matrices: absmean ternarisation, its gradient, and the packed 2-bit layout.

The packed layout is MLX's own affine 2-bit layout: one `uint32` holds 16 neighbouring inputs, the
first in the lowest bits, as `code = trit + 1`. Inputs are padded to a multiple of 32 with zero
trits (code 1). With `scales = s` and `biases = -s` the same buffer serves `mx.quantized_matmul`.
"""

import mlx.core as mx
import numpy as np

from .backend.dispatch import on_cpu
from .host_blocks import CODES_PER_WORD as CODES_PER_WORD
from .host_blocks import PADDING_MULTIPLE, block_sums_of_sizes, pack_rounded
from .host_blocks import packed_width as packed_width
from .long_sums import long_mean, long_sum

ROUNDING_VERSION = 1
"""A number that grows with every change of `ternarize` that moves scales or trits: what was
cached before such a change is made again."""
MOST_CODES = 2**22
"""The most inputs for which sums of 8-bit codes, and what they are made of, fit 32 bits."""


def ternarize(weight: mx.array) -> tuple[mx.array, mx.array]:
    r"""Ternarises one matrix by its mean magnitude (Ma et al., arXiv 2402.17764, eq. 1-3).

    .. math::
        m = \max(\mathrm{mean}(|W|), 10^{-5}), \quad
        t = \mathrm{clip}(\mathrm{round}(W / m), -1, 1)

    Computed in float32, with ties to even. The ternary matrix stands for the weight :math:`t\,m`. Values
    that are ternary already must not be ternarised again, because their mean magnitude is another one.

    Args:
        weight: Floats of shape `(N, D)`.

    Returns:
        The trits as float32 `(N, D)` and `m` as float32 of shape `(1,)`.

    Example:
        >>> trits, scale = ternarize(mx.array([[0.1, -2.0], [0.9, 1.0]]))
        >>> trits.tolist(), scale.tolist()
        ([[0.0, -1.0], [1.0, 1.0]], [1.0])
    """
    weight = weight.astype(mx.float32)
    scale = scale_of_mean(long_mean(mx.abs(weight)))
    return mx.clip(mx.round(weight * (1.0 / scale)), -1.0, 1.0), scale


def ternarize_packed(weight: mx.array) -> tuple[mx.array, mx.array]:
    """Ternarises and packs one matrix at once, with the bits of `ternarize` and `pack_ternary`.

    Args:
        weight: Floats of shape `(N, D)`.

    Returns:
        The words, `uint32` `(N, packed_width(D))`, and the scale, float32 `(1,)`.

    Example:
        >>> words, scale = ternarize_packed(mx.array([[0.1, -2.0], [0.9, 1.0]]))
        >>> unpack_ternary(words, 2).tolist(), scale.tolist()
        ([[0.0, -1.0], [1.0, 1.0]], [1.0])
    """
    if not on_cpu():
        trits, scale = ternarize(weight)
        return pack_ternary(trits), scale
    scale = scale_of_mean(long_sum(block_sums_of_sizes(weight)) / weight.size)
    return pack_rounded(weight, np.asarray(1.0 / scale)), scale


def scale_of_mean(mean: mx.array) -> mx.array:
    """The scale, float32 `(1,)`, of a matrix whose mean magnitude is given."""
    return mx.maximum(mean.reshape(1), 1e-5)


def pack_ternary(trits: mx.array) -> mx.array:
    r"""Packs trits, 16 of them in a word.

    .. math::
        w_{n,j} = \sum_{i=0}^{15} 4^i\,(t_{n,16j+i} + 1)

    Args:
        trits: Values in {-1, 0, 1}, `(N, D)`, any dtype with a sign.

    Returns:
        `uint32` of shape `(N, packed_width(D))`.

    Example:
        >>> bin(pack_ternary(mx.array([[-1.0, 0.0, 1.0]]))[0, 0].item())[-6:]
        '100100'
    """
    rows, input_dims = trits.shape
    width = packed_width(input_dims)
    codes = mx.pad(
        (trits.astype(mx.int32) + 1).astype(mx.uint32),
        [(0, 0), (0, width * CODES_PER_WORD - input_dims)],
        constant_values=mx.array(1, mx.uint32),
    )
    shifts = mx.arange(0, 2 * CODES_PER_WORD, 2, dtype=mx.uint32)
    return mx.left_shift(codes.reshape(rows, width, CODES_PER_WORD), shifts).sum(axis=-1)


def unpack_ternary(weight: mx.array, input_dims: int) -> mx.array:
    r"""Undoes `pack_ternary`.

    .. math::
        t_{n,16j+i} = (\lfloor w_{n,j} / 4^i \rfloor \bmod 4) - 1

    Args:
        weight: Words, `uint32` of shape `(N, packed_width(D))`.
        input_dims: `D`.

    Returns:
        Trits, float32 `(N, D)`.

    Example:
        >>> unpack_ternary(pack_ternary(mx.array([[-1.0, 0.0, 1.0]])), 3).tolist()
        [[-1.0, 0.0, 1.0]]
    """
    shifts = mx.arange(0, 2 * CODES_PER_WORD, 2, dtype=mx.uint32)
    codes = mx.bitwise_and(mx.right_shift(weight[..., None], shifts), 3).astype(mx.float32)
    return codes.reshape(weight.shape[0], -1)[:, :input_dims] - 1.0


def packed_columns(weight: mx.array, input_dims: int, start: int, stop: int) -> mx.array:
    """Some columns of a packed matrix, as a packed matrix of their own.

    Args:
        weight: Packed trits, `uint32` of shape `(N, packed_width(D))`.
        input_dims: `D`.
        start: The first column.
        stop: One past the last.

    Returns:
        `uint32` of shape `(N, packed_width(stop - start))`.

    Example:
        >>> weight = pack_ternary(mx.array([[-1.0, 0.0, 1.0, 1.0]]))
        >>> unpack_ternary(packed_columns(weight, 4, 1, 3), 2).tolist()
        [[0.0, 1.0]]
    """
    if start % CODES_PER_WORD == 0 and (stop - start) % PADDING_MULTIPLE == 0:
        return mx.contiguous(weight[:, start // CODES_PER_WORD : stop // CODES_PER_WORD])
    return pack_ternary(unpack_ternary(weight, input_dims)[:, start:stop])


def straight_through(quantized: mx.array, x: mx.array) -> mx.array:
    r"""Returns `quantized` exactly, with the gradient of `x`.

    .. math::
        y = \mathrm{stop}(q) + (x - \mathrm{stop}(x))

    The bracket is exactly zero, so the value is exactly `q` in every dtype. The ordinary rules of
    differentiation hold under `mx.grad`, `mx.vmap` and `mx.compile` in any order.

    Source: Bengio et al., arXiv 1308.3432.

    Args:
        quantized: The value, of any shape.
        x: What the gradient flows to, of the same shape.

    Returns:
        `quantized`, with its shape and dtype.

    Example:
        >>> x = mx.array([0.2, 1.7])
        >>> straight_through(mx.round(x), x).tolist()
        [0.0, 2.0]
        >>> mx.grad(lambda x: straight_through(mx.round(x), x).sum())(x).tolist()
        [1.0, 1.0]
    """
    return mx.stop_gradient(quantized) + (x - mx.stop_gradient(x))
