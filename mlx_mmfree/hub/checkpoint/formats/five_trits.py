"""Five trits a byte, a format of 1.6 bits a weight for storage and downloads.

A ternary linear `X` of N outputs and D inputs has

- `X.weight`, `uint8` of shape `(N, ceil(D / 5))`: byte `j` of a row holds the inputs `5 j` to `5 j + 4`
  as the number `c0 + 3 c1 + 9 c2 + 27 c3 + 81 c4`, where `c = trit + 1` and `c0` belongs to input
  `5 j`. The digits of the last byte that belong to no input hold the code 1;
- `X.weight_scale`, float32 of shape `(1,)`: the weight is `trit * weight_scale`.

`quantization_config` has `trits_per_byte`. No byte is above 242. As they are read, matrices are unpacked
to the layout of `ops.ternary`, which takes a quarter more memory than the file.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial

import mlx.core as mx
import numpy as np

from ....files.tensors import TensorSpec, host_array
from ....layers.ternary.values import TERNARY_BITS
from ....ops.host_blocks import blocks
from ....ops.ternary import CODES_PER_WORD, packed_width
from ..weight_format import (
    StoredMatrix,
    StoredTensor,
    UnreadMatrix,
    WeightFormat,
    WrittenMatrix,
    always,
)
from .affine import group_size_of
from .packed import OWN, describe_packing, open_packed

TRITS_PER_BYTE = 5
NUMBERS = 3**TRITS_PER_BYTE
BITS = 8 / TRITS_PER_BYTE

_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)
_ZEROS = np.uint8(_POWERS.sum())
"""The byte of five trits 0, which are codes 1."""

_BITS_OF_BYTE = 2 * TRITS_PER_BYTE
# 16 bytes are 80 trits, which fill 5 words of 16 codes
_GROUP_BYTES, _GROUP_WORDS = 16, 5


def _open(unread: Mapping[str, UnreadMatrix]) -> dict[str, StoredMatrix]:
    found = open_packed(unread)
    for path, stored in found.items():
        matrix = unread[path].matrix
        shape = _shape(matrix.output_dims, matrix.input_dims)
        read = partial(unpack, input_dims=matrix.input_dims)
        weight = StoredTensor((shape,), (mx.uint8,), read)
        found[path] = replace(stored, tensors={"weight": weight})
    return found


def _write(name: str, output_dims: int, input_dims: int, dtype: mx.Dtype) -> WrittenMatrix:
    specs = (
        TensorSpec(f"{name}.weight", mx.uint8, _shape(output_dims, input_dims)),
        TensorSpec(f"{name}.weight_scale", mx.float32, (1,)),
    )
    # the codes to which the file beside the weights unpacks them for mlx-lm
    codes = group_size_of(input_dims), TERNARY_BITS
    return WrittenMatrix(specs, lambda words, scale: (pack(words, input_dims), scale), codes=codes)


def _shape(output_dims: int, input_dims: int) -> tuple[int, int]:
    return output_dims, -(-input_dims // TRITS_PER_BYTE)


def pack(weight: mx.array, input_dims: int) -> mx.array:
    """Packs words in the layout of `ops.ternary`.

    Args:
        weight: `uint32` of shape `(N, packed_width(input_dims))`.
        input_dims: The columns of the matrix.
    """
    octets = np.asarray(mx.contiguous(weight)).view(np.uint8)
    rows, width = _shape(len(octets), input_dims)
    packed, capacity = host_array((rows, width), mx.uint8)
    # the four codes of a byte, each in a byte of its own
    single = (np.arange(256)[:, None] >> np.arange(0, 8, 2) & 3).astype(np.uint8)
    fours = single.view(np.uint32)[:, 0]
    for part in blocks(rows, input_dims):
        codes = np.ones((part.stop - part.start, TRITS_PER_BYTE * width), np.uint8)
        codes[:, :input_dims] = fours[octets[part]].view(np.uint8)[:, :input_dims]
        fives = codes.reshape(-1, width, TRITS_PER_BYTE)
        capacity[part] = fives[..., 0]
        for digit in range(1, TRITS_PER_BYTE):
            capacity[part] += fives[..., digit] * _POWERS[digit]
    return packed


def unpack(weight: mx.array, input_dims: int) -> mx.array:
    """The inverse of `pack`. A byte above 242, or another padding, becomes codes 3.

    Args:
        weight: `uint8` of shape `(N, ceil(input_dims / 5))`.
        input_dims: The columns of the matrix.
    """
    packed = np.asarray(weight)
    rows, width = packed.shape
    words, capacity = host_array((rows, packed_width(input_dims)), mx.uint32)
    groups = -(-capacity.shape[1] // _GROUP_WORDS)
    table = _codes_of_pairs()
    for part in blocks(rows, input_dims):
        octets = np.full((part.stop - part.start, _GROUP_BYTES * groups), _ZEROS, np.uint8)
        octets[:, :width] = packed[part]
        _mark_padding(octets[:, width - 1], input_dims)
        pairs = octets.view("<u2").reshape(len(octets), groups, -1)
        filled = np.zeros((len(octets), groups, _GROUP_WORDS), np.uint32)
        for number in range(pairs.shape[-1]):
            codes = table[pairs[..., number]]
            word, shift = divmod(2 * _BITS_OF_BYTE * number, 2 * CODES_PER_WORD)
            filled[..., word] |= codes << np.uint32(shift)
            if shift + 2 * _BITS_OF_BYTE > 2 * CODES_PER_WORD:
                filled[..., word + 1] |= codes >> np.uint32(2 * CODES_PER_WORD - shift)
        capacity[part] = filled.reshape(len(octets), -1)[:, : capacity.shape[1]]
    return words


def _mark_padding(last: np.ndarray, input_dims: int) -> None:
    """Sets the last bytes of rows, in place, to 255 where digits without an input have other codes."""
    used = input_dims % TRITS_PER_BYTE
    padding_from = 3**used if used else NUMBERS
    last[last // padding_from != _ZEROS // padding_from] = 255


@cache
def _codes_of_pairs() -> np.ndarray:
    """The ten 2-bit codes of each two bytes, `uint32`; bytes that do not exist have codes 3."""
    values = np.arange(256, dtype=np.uint32)
    digits = (values[:, None] // _POWERS % 3) << np.arange(0, _BITS_OF_BYTE, 2, dtype=np.uint32)
    codes = np.where(
        values < NUMBERS, digits.sum(axis=1, dtype=np.uint32), (1 << _BITS_OF_BYTE) - 1
    )
    codes = codes.astype(np.uint32)
    return (codes[:, None] << np.uint32(_BITS_OF_BYTE) | codes).reshape(-1)


# other bits, so that versions that do not know the format refuse it
_OWN = {**OWN, "bits": BITS, "trits_per_byte": TRITS_PER_BYTE}

FORMAT = WeightFormat(
    name="five_trits",
    open=_open,
    own=_OWN,
    covers=always,
    write=_write,
    describe_written=partial(describe_packing, own=_OWN),
    trits_per_byte=TRITS_PER_BYTE,
    # with the file that unpacks it
    opens_in=("mlx-lm",),
    words=f"Ternary weights are stored with {TRITS_PER_BYTE} trits a byte, {BITS} bits each. They are "
    "unpacked to 2 bits when the model is loaded.",
)
