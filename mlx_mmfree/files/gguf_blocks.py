"""The tensor types of GGUF files: their sizes, and how their blocks are decoded and encoded.

Sources: ggml's block formats, the format of bitnet.cpp for I2_S, and the formats of PrismML's llama.cpp
for PQ2_0 and PTQ1_0. A block holds consecutive inputs of one row. Floats in blocks are little-endian
float16. The package `gguf` has none of these and no Q2_0, and rounds floats where exact codes are at
hand here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Decoder = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class TensorType:
    """One way to store a matrix.

    Attributes:
        name: The name that ggml gives it.
        block: The number of values in a block. Rows hold whole blocks.
        block_bytes: The number of bytes of a block.
        tail_bytes: The number of bytes after the last block.
        decode: Turns bytes, `uint8 (blocks, block_bytes)`, into float32 values `(blocks, block)`. `None`
            for plain numbers and ternary types.
        codes: Turns the bytes of a ternary type into codes, `trit + 1`, `uint8 (blocks, block)`, and
            float32 scales, one for each block. Where the scale follows the last block, there are none.
            A type of signs has no code 1.
        has_scale_first: Whether the scale of a ternary block is stored before its codes.
        code_bits: The bits of a code in MLX's affine format, which then holds the tensor; 0 if it does
            not. With 2 bits, code 3 stands for twice the scale. Each block may have a scale of its own.
        pack: Turns codes of blocks into their bytes without scales, for a ternary type that is written.
        file_type: The number of `general.file_type` of a model in this type. bitnet.cpp and llama.cpp
            gave one of them to two types.
    """

    name: str
    block: int
    block_bytes: int
    tail_bytes: int = 0
    decode: Decoder | None = None
    codes: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None
    has_scale_first: bool = False
    code_bits: int = 0
    pack: Callable[[np.ndarray], np.ndarray] | None = None
    file_type: int = -1

    @property
    def has_one_scale(self) -> bool:
        """True if all blocks share a float32 scale, as for kernels with 8-bit activations."""
        return self.tail_bytes > 0

    @property
    def has_zero(self) -> bool:
        """True if a ternary type holds zeros. One of a bit a weight has signs alone."""
        return self.code_bits != 1

    def nbytes(self, values: int) -> int:
        """The number of bytes of a tensor with so many values."""
        return values // self.block * self.block_bytes + self.tail_bytes

    def blocks(self, data: np.ndarray) -> np.ndarray:
        """The blocks of a tensor's bytes, `(blocks, block_bytes)`."""
        return data[: data.size - self.tail_bytes].reshape(-1, self.block_bytes)


def _float16(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    """A scale, then 4 bits a value, offset by 8. The low halves of the bytes hold values 0 to 15."""
    quants = blocks[:, 2:]
    values = np.concatenate([quants & 15, quants >> 4], axis=1).astype(np.float32) - 8
    return values * _float16(blocks[:, :2])


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """A scale, then one signed byte a value."""
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _float16(blocks[:, :2])


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    """The scales of all factors and of all offsets, 8 of each in 6 bits, then 4 bits a value.

    The first four factors and offsets have the low 6 bits of bytes 0 to 7, whose high 2 bits belong
    to the last four, beside the halves of bytes 8 to 11.
    """
    low, high = blocks[:, 4:12].reshape(-1, 2, 4), blocks[:, 12:16]
    rest = np.stack([high & 15, high >> 4], axis=1) | (low >> 6) << 4
    parts = np.concatenate([low & 63, rest], axis=2).astype(np.float32)
    factors = (parts[:, 0] * _float16(blocks[:, :2]))[..., None]
    offsets = (parts[:, 1] * _float16(blocks[:, 2:4]))[..., None]
    # of each 32 bytes: the low halves, then the high ones
    quants = blocks[:, 16:].reshape(-1, 4, 1, 32)
    values = np.concatenate([quants & 15, quants >> 4], axis=2).reshape(-1, 8, 32)
    return (values * factors - offsets).reshape(-1, 256).astype(np.float32)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """The low 4 bits, the high 2 bits, a signed byte for each 16 values, then the scale of all."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    # in each half of 128 values: the low halves of 64 bytes, then the high ones
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    values = (low | ((high >> shifts) & 3) << 4).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _float16(blocks[:, 208:])
    return (values.reshape(-1, 16, 16) * scales[..., None]).reshape(-1, 256)


def _tq1_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Five trits a byte, as a fraction of 3^5, most significant first. The last 4 bytes hold 4 each."""
    parts = [
        _base3_digits(blocks[:, :32], 5),
        _base3_digits(blocks[:, 32:48], 5),
        _base3_digits(blocks[:, 48:52], 4),
    ]
    return np.concatenate(parts, axis=1), _float16(blocks[:, 52:])[:, 0]


def _base3_digits(data: np.ndarray, count: int) -> np.ndarray:
    powers = (3 ** np.arange(count)).astype(np.uint8)[:, None]
    digits = ((data[:, None] * powers).astype(np.uint16) * 3) >> 8
    return digits.astype(np.uint8).reshape(len(data), -1)


def _tq2_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two halves of 32 bytes. The two bits at `2l` of byte `j` are value `32l + j` of the half."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    codes = (blocks[:, :64].reshape(-1, 2, 1, 32) >> shifts) & 3
    return codes.reshape(len(blocks), -1), _float16(blocks[:, 64:])[:, 0]


def _q2_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A scale, then 2 bits a value, the first value in the lowest bits."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)
    codes = (blocks[:, 2:, None] >> shifts) & 3
    return codes.reshape(len(blocks), -1), _float16(blocks[:, :2])[:, 0]


def _q1_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A scale, then one bit a value, the first value in the lowest bit: set for the scale itself, not
    set for its negative.
    """
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    return 2 * bits, _float16(blocks[:, :2])[:, 0]


def _ptq1_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The codes of PTQ1_0: the layout of TQ1_0 with 16, 8 and 2 bytes."""
    parts = [
        _base3_digits(blocks[:, :16], 5),
        _base3_digits(blocks[:, 16:24], 5),
        _base3_digits(blocks[:, 24:26], 4),
    ]
    return np.concatenate(parts, axis=1), _float16(blocks[:, 26:])[:, 0]


def _i2_s(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two bits at `6 - 2l` of byte `j` are value `32l + j`. The scale follows the last block."""
    shifts = np.arange(6, -1, -2, dtype=np.uint8)[:, None]
    codes = (blocks[:, None] >> shifts) & 3
    return codes.reshape(len(blocks), -1), np.empty(0, np.float32)


_TRIT_WEIGHTS = np.array([81, 27, 9, 3, 1], np.uint16)[:, None]


def _q2_0_bytes(blocks: np.ndarray) -> np.ndarray:
    four = blocks.reshape(len(blocks), -1, 4)
    return four[..., 0] | four[..., 1] << 2 | four[..., 2] << 4 | four[..., 3] << 6


def _q1_0_bytes(blocks: np.ndarray) -> np.ndarray:
    return np.packbits(blocks == 2, axis=1, bitorder="little")


def _tq2_0_bytes(blocks: np.ndarray) -> np.ndarray:
    parts = blocks.reshape(-1, 2, 4, 32)
    packed = parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6
    return packed.reshape(len(blocks), 64)


def _tq1_0_bytes(blocks: np.ndarray) -> np.ndarray:
    parts = (
        blocks[:, :160].reshape(-1, 5, 32),
        blocks[:, 160:240].reshape(-1, 5, 16),
        blocks[:, 240:].reshape(-1, 4, 4),
    )
    return np.concatenate([_base3_bytes(part) for part in parts], axis=1)


def _base3_bytes(digits: np.ndarray) -> np.ndarray:
    """Bytes of base-3 digits, most significant first along axis 1, as fractions of 3^5, rounded up."""
    values = (digits * _TRIT_WEIGHTS[: digits.shape[1]]).sum(axis=1, dtype=np.uint16)
    return ((values.astype(np.uint32) * 256 + 242) // 243).astype(np.uint8)


def _i2_s_bytes(blocks: np.ndarray) -> np.ndarray:
    parts = blocks.reshape(-1, 4, 32)
    return parts[:, 0] << 6 | parts[:, 1] << 4 | parts[:, 2] << 2 | parts[:, 3]


TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4, file_type=0),
    1: TensorType("F16", 1, 2, file_type=1),
    2: TensorType("Q4_0", 32, 18, decode=_q4_0),
    8: TensorType("Q8_0", 32, 34, decode=_q8_0),
    12: TensorType("Q4_K", 256, 144, decode=_q4_k),
    14: TensorType("Q6_K", 256, 210, decode=_q6_k),
    30: TensorType("BF16", 1, 2, file_type=32),
    34: TensorType("TQ1_0", 256, 54, codes=_tq1_0, pack=_tq1_0_bytes, file_type=36),
    35: TensorType("TQ2_0", 256, 66, codes=_tq2_0, pack=_tq2_0_bytes, file_type=37),
    36: TensorType("I2_S", 128, 32, 32, codes=_i2_s, pack=_i2_s_bytes, file_type=40),
    41: TensorType(
        "Q1_0",
        128,
        18,
        codes=_q1_0,
        has_scale_first=True,
        code_bits=1,
        pack=_q1_0_bytes,
        file_type=40,
    ),
    42: TensorType(
        "Q2_0",
        64,
        18,
        codes=_q2_0,
        has_scale_first=True,
        code_bits=2,
        pack=_q2_0_bytes,
        file_type=41,
    ),
    142: TensorType(
        "PQ2_0",
        128,
        34,
        codes=_q2_0,
        has_scale_first=True,
        code_bits=2,
        pack=_q2_0_bytes,
        file_type=142,
    ),
    143: TensorType("PTQ1_0", 128, 28, codes=_ptq1_0, code_bits=2),
}
"""The types that are read, by their numbers in the file."""

Q2_0, PQ2_0 = 42, 142
"""PrismML's first files have for PQ2_0 the number that Q2_0 was given later."""

UNREAD = {
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    10: "Q2_K",
    11: "Q3_K",
    13: "Q5_K",
    20: "IQ4_NL",
    23: "IQ4_XS",
    38: "TL1",
    39: "TL2 or MXFP4",
}
"""The names of further types, for messages."""


def ternary_scale(kind: TensorType, data: np.ndarray) -> np.ndarray:
    """The distinct scales of a ternary tensor, sorted, without the zero scales of blocks of zeros."""
    if kind.has_one_scale:
        return data[data.size - kind.tail_bytes :][:4].view("<f4")
    blocks = kind.blocks(data)
    return np.unique(_nonzero(_scales(kind, blocks)[:, 0]))


def _scales(kind: TensorType, blocks: np.ndarray) -> np.ndarray:
    return _float16(blocks[:, :2] if kind.has_scale_first else blocks[:, -2:])


def _nonzero(scales: np.ndarray) -> np.ndarray:
    return scales[scales != 0] if np.any(scales != 0) else scales[:1]


def ternary_words(kind: TensorType, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The trits of a tensor in the layout of `ops.ternary`, `uint32 (rows, packed width)`."""
    if kind.codes is None:
        raise ValueError(f"[GGUF] 'kind' must be ternary but got {kind.name}.")
    codes, scales = kind.codes(kind.blocks(data))
    if scales.size:
        codes[scales == 0] = 1
    return pack_codes(codes.reshape(shape))


def code_words(kind: TensorType, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The codes of an affine type in MLX's format, `uint32 (rows, inputs * bits / 32)`."""
    blocks = kind.blocks(data)
    if kind.codes is not None and not kind.has_scale_first:
        return pack_codes(kind.codes(blocks)[0].reshape(shape))
    return np.ascontiguousarray(blocks[:, 2:]).reshape(shape[0], -1).view("<u4")


def code_scales(
    kind: TensorType, data: np.ndarray, shape: tuple[int, ...], factor: int = 1
) -> np.ndarray:
    """The scales of an affine type, times a factor, as the bits of float16 `(rows, inputs / block)`."""
    # NaN and infinity are found when the parameter is loaded
    with np.errstate(invalid="ignore", over="ignore"):
        scales = factor * _scales(kind, kind.blocks(data))
        return scales.astype("<f2").reshape(shape[0], -1).view("<u2")


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """Codes `uint8 (rows, inputs)` in the layout of `ops.ternary`."""
    rows, inputs = codes.shape
    width = -(-inputs // 16) * 16
    if width > inputs:
        codes = np.pad(codes, ((0, 0), (0, width - inputs)), constant_values=1)
    four = np.ascontiguousarray(codes).view("<u4")
    packed = (four | four >> 6 | four >> 12 | four >> 18).astype(np.uint8)
    return packed.reshape(rows, -1).view("<u4")


def dequantized(kind: TensorType, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The values of a tensor: of ternary types in float16, which is exact, of others in float32."""
    blocks = kind.blocks(data)
    # NaN in scales is found by the check of the values
    with np.errstate(invalid="ignore", over="ignore"):
        if kind.decode is not None:
            return kind.decode(blocks).reshape(shape)
        if kind.codes is None:
            raise ValueError(f"[GGUF] 'kind' must be quantised but got {kind.name}.")
        codes, scales = kind.codes(blocks)
        if not scales.size:
            return ((codes.astype(np.float32) - 1) * ternary_scale(kind, data)).reshape(shape)
        return ((codes.astype(np.float16) - 1) * scales.astype(np.float16)[:, None]).reshape(shape)


def unpack_codes(words: np.ndarray, input_dims: int, bits: int = 2) -> np.ndarray:
    """The codes, `trit + 1`, of words in the layout of `ops.ternary`, or of signs of one bit each, as
    `uint8 (N, D)`.
    """
    if bits == 1:
        return 2 * np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    data = np.ascontiguousarray(words).view(np.uint8)
    codes = (data[..., None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
    return np.ascontiguousarray(codes.reshape(len(words), -1)[:, :input_dims])


def encode(kind: TensorType, codes: np.ndarray, scale: float | np.ndarray) -> np.ndarray:
    """The bytes of a ternary matrix in one of the types.

    Args:
        kind: The type.
        codes: `trit + 1`, `uint8 (N, D)`, where D is a multiple of the type's block. Without zeros
            there is no 1.
        scale: The number that trits are multiplied by. A type with one scale stores it in float32.
            The other types round it to float16 and also take one for each block of b inputs,
            `(N, D / b)`.

    Returns:
        The bytes, `uint8` of one axis.
    """
    if kind.pack is None:
        raise ValueError(f"[GGUF] 'kind' must be one that is written but got {kind.name}.")
    packed = kind.pack(codes.reshape(-1, kind.block))
    if kind.has_one_scale:
        tail = np.full(kind.tail_bytes // 4, scale, np.float32).view(np.uint8)
        return np.concatenate([packed.reshape(-1), tail])
    scales = _scale_bytes(scale, len(packed))
    parts = [scales, packed] if kind.has_scale_first else [packed, scales]
    return np.concatenate(parts, axis=1).reshape(-1)


def _scale_bytes(scale: float | np.ndarray, count: int) -> np.ndarray:
    scales = np.broadcast_to(np.asarray(scale, np.float16).reshape(-1, 1), (count, 1))
    return np.ascontiguousarray(scales).view(np.uint8)
