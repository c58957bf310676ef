"""Encodes ternary matrices in the block formats of GGUF, which `types` decodes.

The package `gguf` has no I2_S and no Q2_0, and rounds floats where exact codes are at hand here.
"""

import numpy as np

_TRIT_WEIGHTS = np.array([81, 27, 9, 3, 1], np.uint16)[:, None]


def unpack_codes(words: np.ndarray, input_dims: int) -> np.ndarray:
    """The codes, `trit + 1`, of words in the layout of `ops.ternary`, as `uint8 (N, D)`."""
    data = np.ascontiguousarray(words).view(np.uint8)
    codes = (data[..., None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
    return np.ascontiguousarray(codes.reshape(len(words), -1)[:, :input_dims])


def encode(kind: str, codes: np.ndarray, scale: float | np.ndarray) -> np.ndarray:
    """The bytes of a ternary matrix in one of the types.

    Args:
        kind: The name of the type.
        codes: `trit + 1`, `uint8 (N, D)`, where D is a multiple of the type's block.
        scale: The number that trits are multiplied by. I2_S keeps it in float32. The other types round
            it to float16 and also take one for each block of b inputs, `(N, D / b)`.

    Returns:
        The bytes, `uint8` of one axis.
    """
    if kind == "I2_S":
        tail = np.full(8, scale, np.float32).view(np.uint8)
        return np.concatenate([_i2_s(codes.reshape(-1, 128)).reshape(-1), tail])
    if kind == "Q2_0":
        return _q2_0(codes.reshape(-1, 64), scale)
    blocks = codes.reshape(-1, 256)
    packed = _tq2_0(blocks) if kind == "TQ2_0" else _tq1_0(blocks)
    return np.concatenate([packed, _scale_bytes(scale, len(blocks))], axis=1).reshape(-1)


def _scale_bytes(scale: float | np.ndarray, count: int) -> np.ndarray:
    scales = np.broadcast_to(np.asarray(scale, np.float16).reshape(-1, 1), (count, 1))
    return np.ascontiguousarray(scales).view(np.uint8)


def _q2_0(blocks: np.ndarray, scale: float | np.ndarray) -> np.ndarray:
    four = blocks.reshape(len(blocks), 16, 4)
    packed = four[..., 0] | four[..., 1] << 2 | four[..., 2] << 4 | four[..., 3] << 6
    return np.concatenate([_scale_bytes(scale, len(blocks)), packed], axis=1).reshape(-1)


def _tq2_0(blocks: np.ndarray) -> np.ndarray:
    parts = blocks.reshape(-1, 2, 4, 32)
    packed = parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6
    return packed.reshape(len(blocks), 64)


def _tq1_0(blocks: np.ndarray) -> np.ndarray:
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


def _i2_s(blocks: np.ndarray) -> np.ndarray:
    parts = blocks.reshape(-1, 4, 32)
    return parts[:, 0] << 6 | parts[:, 1] << 4 | parts[:, 2] << 2 | parts[:, 3]
