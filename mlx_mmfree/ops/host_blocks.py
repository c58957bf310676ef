"""Works on large matrices in blocks that stay in the processor's cache.

This is for work that is done once, when weights are loaded. Each operation of MLX reads and writes the
whole matrix, and a CPU would wait for memory in every one of a dozen operations.
"""

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import numpy as np

from .long_sums import BLOCK

_NUMBERS = 2**16
"""Numbers of a block. A few copies of them fit into a second-level cache."""

# the bits of the largest exponent, which only NaN and infinity have
_EXPONENTS = {mx.float16: 0x7C00, mx.bfloat16: 0x7F80, mx.float32: 0x7F800000}


CODES_PER_WORD = 16
PADDING_MULTIPLE = 32


def packed_width(input_dims: int) -> int:
    """The number of 32-bit words in a packed row.

    Args:
        input_dims: The number of inputs `D`.

    Returns:
        Two words for each 32 inputs that are begun.

    Example:
        >>> packed_width(1), packed_width(64)
        (2, 4)
    """
    return -(-input_dims // PADDING_MULTIPLE) * PADDING_MULTIPLE // CODES_PER_WORD


def blocks(count: int, width: int) -> Iterator[slice]:
    """Slices of `count` rows of `width` numbers.

    One thread does the work, because several would wait for the interpreter between operations of a few
    microseconds.
    """
    step = max(1, _NUMBERS // max(width, 1))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def all_finite(array: mx.array) -> bool:
    """Returns whether an array holds neither NaN nor infinity. Whole numbers never do."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return True
    exponent = _EXPONENTS[array.dtype]
    bits = np.asarray(array.reshape(-1).view(mx.uint16 if array.dtype.size == 2 else mx.uint32))
    magnitude = bits.dtype.type(np.iinfo(bits.dtype).max >> 1)
    return all((bits[part] & magnitude).max() < exponent for part in blocks(bits.size, 1))


def has_valid_codes(words: mx.array, input_dims: int) -> bool:
    """Returns whether words of `ops.ternary` have only codes 0 to 2, and code 1 in the padding."""
    bits = np.asarray(words.reshape(-1))
    for part in blocks(bits.size, 1):
        block = bits[part]
        if (block & (block >> np.uint32(1)) & np.uint32(0x55555555)).any():
            return False
    shifts = mx.arange(0, 2 * CODES_PER_WORD, 2, dtype=mx.uint32)
    tail = words[:, input_dims // CODES_PER_WORD :, None] >> shifts
    padding = mx.bitwise_and(tail, 3).reshape(words.shape[0], -1)[:, input_dims % CODES_PER_WORD :]
    return bool(mx.all(padding == 1).item())


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """Packs codes 0 to 3 into `uint32` words, in which the first code has the lowest bits.

    Args:
        codes: `uint8` with a multiple of 16 columns.
    """
    fours = codes.view(np.uint32)
    # four bytes become the four pairs of bits of the lowest one
    fours = fours | fours >> np.uint32(6)
    fours |= fours >> np.uint32(12)
    return fours.astype(np.uint8).view(np.uint32)


def unpack_codes(weights: Sequence[mx.array], dims: int) -> mx.array:
    """Unpacks matrices and puts their trits one below the other, float32 `(N, D)`.

    Args:
        weights: Words of 16 codes, `uint32`, all of one width.
        dims: The number of columns that are not padding.
    """
    # the four trits of each byte
    table = (np.arange(256)[:, None] >> np.arange(0, 8, 2) & 3).astype(np.float32) - 1
    shape = sum(weight.shape[0] for weight in weights), dims
    # no `host_array`, because this may happen in a backward pass
    trits = mx.array(np.empty(shape, np.float32))
    rest = np.array(trits, copy=False)
    for weight in weights:
        # a layer without weights yet holds one word that is broadcast
        octets = np.asarray(mx.contiguous(weight)).view(np.uint8)
        rows, rest = np.split(rest, [len(octets)])
        for part in blocks(len(octets), dims):
            fours = np.take(table, octets[part], axis=0)
            rows[part] = fours.reshape(len(fours), -1)[:, :dims]
    return trits


def block_sums_of_sizes(weight: mx.array) -> mx.array:
    """The numbers that the first round of `long_sum` makes of `|weight|`, with the same bits."""
    flat, to_float = _floats(weight.reshape(-1))
    summands = flat[: flat.size // BLOCK * BLOCK].reshape(BLOCK, -1)
    sums = np.empty(summands.shape[1], np.float32)
    for part in blocks(len(sums), 4):
        # weights may hold infinities, which the caller finds
        with np.errstate(all="ignore"):
            total = np.abs(to_float(summands[0, part]))
            for row in summands[1:]:
                total += np.abs(to_float(row[part]))
        sums[part] = total
    return mx.array(np.concatenate([sums, np.abs(to_float(flat[summands.size :]))]))


def pack_rounded(weight: mx.array, inverse: np.ndarray) -> mx.array:
    """Packs `clip(round(weight * inverse), -1, 1)`, computed in float32, into words.

    Args:
        weight: Floats `(N, D)`.
        inverse: The reciprocal of the scale, float32 `(1,)`.

    Returns:
        `uint32` `(N, packed_width(D))`.
    """
    values, to_float = _floats(weight)
    rows, dims = values.shape
    width = packed_width(dims)
    words = np.empty((rows, width), np.uint32)
    half = np.float32(0.5)
    for part in blocks(rows, dims):
        with np.errstate(all="ignore"):
            scaled = to_float(values[part]) * inverse
        codes = np.full((len(scaled), CODES_PER_WORD * width), 1, np.uint8)
        # halves round to zero
        np.add(
            (scaled > half).view(np.uint8), (scaled >= -half).view(np.uint8), out=codes[:, :dims]
        )
        words[part] = pack_codes(codes)
    return mx.array(words)


def _floats(array: mx.array) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """The array as NumPy can hold it, and a function that turns a part of it into float32."""
    if array.dtype == mx.bfloat16:
        return np.asarray(array.view(mx.uint16)), _widened
    return np.asarray(array), lambda part: part.astype(np.float32, copy=False)


def _widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
