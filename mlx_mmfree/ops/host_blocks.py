"""Large matrices of weights on the host, a block at a time that stays in the processor's cache.

For work that is done once, when weights are loaded: an operation of MLX passes through memory for the
whole matrix, and a CPU waits for memory at each of a dozen of them.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from ..files.host_array import host_array
from .long_sums import BLOCK

_NUMBERS = 2**16
"""Numbers of a block: a few copies of them fit into a second-level cache."""

# The largest exponent, which NaN and infinity alone have, in the bits of a float without its sign.
_EXPONENTS = {mx.float16: 0x7C00, mx.bfloat16: 0x7F80, mx.float32: 0x7F800000}


def in_blocks(count: int, width: int, work: Callable[[slice], None]) -> None:
    """Calls `work` with slices of `count` rows of `width` numbers.

    On one thread: others would wait for the interpreter between operations of a few microseconds.
    """
    step = max(1, _NUMBERS // max(width, 1))
    # weights may hold infinities, which the caller finds
    with np.errstate(all="ignore"):
        for start in range(0, count, step):
            work(slice(start, min(start + step, count)))


def all_finite(array: mx.array) -> bool:
    """Whether an array holds neither NaN nor infinity; whole numbers never do."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return True
    exponent = _EXPONENTS[array.dtype]
    bits = np.asarray(array.reshape(-1).view(mx.uint16 if array.dtype.size == 2 else mx.uint32))
    magnitude = bits.dtype.type(np.iinfo(bits.dtype).max >> 1)
    largest = []
    in_blocks(bits.size, 1, lambda part: largest.append((bits[part] & magnitude).max()))
    return all(each < exponent for each in largest)


def has_code_three(words: mx.array) -> bool:
    """Whether one of the 2-bit codes in `uint32` words is 3."""
    bits = np.asarray(words.reshape(-1))
    low = np.uint32(0x55555555)
    found = []

    def look(part: slice) -> None:
        block = bits[part]
        found.append(bool((block & (block >> np.uint32(1)) & low).any()))

    in_blocks(bits.size, 1, look)
    return any(found)


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """Codes 0 to 3, `uint8` with a multiple of 16 columns, as `uint32` words, the first code lowest."""
    fours = codes.view(np.uint32)
    # four bytes become the four pairs of bits of the lowest one
    fours = fours | fours >> np.uint32(6)
    fours |= fours >> np.uint32(12)
    return fours.astype(np.uint8).view(np.uint32)


def unpack_codes(weights: Sequence[mx.array], dims: int) -> mx.array:
    """The trits of packed matrices, one below the other, as float32 `(N, D)`.

    Args:
        weights: Words of 16 codes, `uint32`, of one width.
        dims: Columns that are no padding.
    """
    # the four trits of each byte
    table = (np.arange(256)[:, None] >> np.arange(0, 8, 2) & 3).astype(np.float32) - 1
    trits, rest = host_array((sum(weight.shape[0] for weight in weights), dims), mx.float32)
    for weight in weights:
        octets = np.asarray(weight).view(np.uint8)
        rows, rest = np.split(rest, [len(octets)])

        def unpack(part: slice, octets: np.ndarray = octets, rows: np.ndarray = rows) -> None:
            fours = np.take(table, octets[part], axis=0)
            rows[part] = fours.reshape(len(fours), -1)[:, :dims]

        in_blocks(len(octets), dims, unpack)
    return trits


def block_sums_of_sizes(weight: mx.array) -> mx.array:
    """Numbers whose `long_sum` is that of `|weight|`, bit for bit: those of its first round."""
    flat, to_float = _floats(weight.reshape(-1))
    blocks = flat[: flat.size // BLOCK * BLOCK].reshape(BLOCK, -1)
    sums = np.empty(blocks.shape[1], np.float32)

    def add(part: slice) -> None:
        total = np.abs(to_float(blocks[0, part]))
        for row in blocks[1:]:
            total += np.abs(to_float(row[part]))
        sums[part] = total

    in_blocks(blocks.shape[1], 4, add)
    return mx.array(np.concatenate([sums, np.abs(to_float(flat[blocks.size :]))]))


def pack_rounded(weight: mx.array, inverse: np.ndarray, width: int) -> mx.array:
    """`clip(round(weight * inverse), -1, 1)` in float32, packed into `width` words a row.

    Args:
        weight: Floats `(N, D)`.
        inverse: The reciprocal of the scale, float32 `(1,)`.
        width: Words of a row, `packed_width(D)`.
    """
    values, to_float = _floats(weight)
    rows, dims = values.shape
    words = np.empty((rows, width), np.uint32)
    half = np.float32(0.5)

    def pack(part: slice) -> None:
        scaled = to_float(values[part]) * inverse
        codes = np.full((len(scaled), 16 * width), 1, np.uint8)
        # halves round to zero
        np.add(
            (scaled > half).view(np.uint8), (scaled >= -half).view(np.uint8), out=codes[:, :dims]
        )
        words[part] = pack_codes(codes)

    in_blocks(rows, dims, pack)
    return mx.array(words)


def _floats(array: mx.array) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """The array as NumPy can hold it, and what makes float32 of a part of it."""
    if array.dtype == mx.bfloat16:
        return np.asarray(array.view(mx.uint16)), _widened
    return np.asarray(array), lambda part: part.astype(np.float32, copy=False)


def _widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
