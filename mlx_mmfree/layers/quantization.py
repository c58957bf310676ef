"""Vectors stored in few bits, with a scale and a bias for each group of neighbours."""

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class Quantization:
    """How vectors are stored.

    Attributes:
        bits: Bits of a code.
        group_size: Neighbours that share a scale and a bias; divides the vectors' dims.

    Raises:
        ValueError: MLX knows no such number of bits or group size.
    """

    bits: int = 8
    group_size: int = 64

    def __post_init__(self) -> None:
        for name, known in (("bits", BITS), ("group_size", GROUP_SIZES)):
            if type(getattr(self, name)) is not int or getattr(self, name) not in known:
                raise ValueError(
                    f"[Quantization] '{name}' must be one of {', '.join(map(str, known))} but got "
                    f"{getattr(self, name)}."
                )


class QuantizedArray(NamedTuple):
    r"""Vectors :math:`x \approx s\,c + b` along the last axis, each group with its own s and b.

    Attributes:
        codes: `uint32` `(..., K * bits / 32)`.
        scales: `(..., K / group_size)` in the dtype of the vectors.
        biases: As `scales`.
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array

    @classmethod
    def encode(cls, x: mx.array, quantization: Quantization) -> "QuantizedArray":
        """The nearest codes of `x` `(..., K)`; each vector's depend on itself alone."""
        bits, group_size = quantization.bits, quantization.group_size
        return cls(*mx.quantize(x, group_size=group_size, bits=bits))

    def quantization(self, dims: int) -> Quantization:
        """How vectors of `K = dims` are stored here."""
        return Quantization(self.codes.shape[-1] * 32 // dims, dims // self.scales.shape[-1])

    def decode(self, dims: int) -> mx.array:
        """The vectors `(..., K)` with `K = dims`, in the dtype of the scales."""
        stored = self.quantization(dims)
        return mx.dequantize(
            self.codes, self.scales, self.biases, group_size=stored.group_size, bits=stored.bits
        )
