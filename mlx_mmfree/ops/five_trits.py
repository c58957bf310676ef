"""The layout of ternary matrices with five trits a byte, which the compiled `bit_linear` multiplies.

A row of `D` inputs has `ceil(D / 5)` bytes, and byte `j` belongs to the inputs `5 j` to `5 j + 4`. With
codes `c = trit + 1`, these are the digits of `v = c0 + 3 c1 + 9 c2 + 27 c3 + 81 c4`, and the byte is the
fraction `f = ceil(256 v / 243)`: with `f' = 3 f mod 256`, the highest digit is `(3 f - f') / 256`, and
`f'` is the fraction of the other digits. Places that belong to no input hold the code 1. Files hold `v`
itself, see `hub.checkpoint.forms.five_trits`.
"""

import mlx.core as mx
import numpy as np

TRITS_PER_BYTE = 5

MOST_INPUTS = 2**16
"""The most inputs for which sums of fractions times codes fit 32 bits."""

NO_FRACTION = 1
"""A byte that stands for no trits."""

NUMBERS = 3**TRITS_PER_BYTE
FRACTIONS = -(-256 * np.arange(NUMBERS) // NUMBERS)
"""The fraction of each number."""


def refuse_fives(weight: mx.array) -> str | None:
    """Why a backend that reads words cannot run with a matrix, or `None`."""
    return "the weights have five trits a byte" if weight.dtype == mx.uint8 else None


def five_width(input_dims: int) -> int:
    """The number of bytes in a row of five trits a byte."""
    return -(-input_dims // TRITS_PER_BYTE)


def unpack_fives(weight: mx.array, input_dims: int) -> mx.array:
    """The trits, float32 `(N, input_dims)`, of bytes `(N, five_width(input_dims))`."""
    fractions, digits = weight.astype(mx.uint16), []
    for _ in range(TRITS_PER_BYTE):
        thrice = 3 * fractions
        digits.append(thrice >> 8)
        fractions = thrice & 255
    codes = mx.stack(digits[::-1], axis=-1).reshape(weight.shape[0], -1)
    return codes[:, :input_dims].astype(mx.float32) - 1.0
