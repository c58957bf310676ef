"""Layers whose packed weights are rotated, so that what they are multiplied with is rotated too."""

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..ops import AffineFormat, hadamard
from .fusing import Fusable, Rotated
from .matrix import Matrix, affine_product


class RotatedLinear(Fusable, Matrix, nn.Module):
    r"""A linear layer in MLX's affine format whose weight was rotated before it was rounded.

    .. math::
        y = \mathrm{H}(s \odot x)\,Q^\top

    with the blockwise transform of `ops.hadamard`. The matrix is :math:`W = \mathrm{H}(Q) \odot s`, by
    rows. Without the rotation the layer would compute something else, of the same shape.

    Parameters are `weight`, `scales` and `biases` of `mx.quantize`, and `signs`, float32, which
    `set_dtype` leaves alone.

    Args:
        input_dims: Size of the last axis of the input.
        output_dims: Size of the last axis of the result.
        group_size: Neighbouring inputs that share a scale and a bias.
        bits: Bits of a code.
        block: Inputs that are rotated together, a power of two.

    Shape:
        Input `(..., input_dims)`, result `(..., output_dims)`.

    Example:
        >>> RotatedLinear(128, 32, group_size=128, bits=2, block=64)(mx.ones((2, 128))).shape
        (2, 32)
    """

    is_rotated = True
    variant = Rotated
    fixed_dtypes: ClassVar[tuple[str, ...]] = ("weight", "signs")
    input_dims: int = 0
    output_dims: int = 0

    def __init__(
        self, input_dims: int, output_dims: int, *, group_size: int, bits: int, block: int
    ):
        super().__init__()
        self.input_dims, self.output_dims = input_dims, output_dims
        self.codes_group, self.bits, self.block = group_size, bits, block
        self.weight = mx.zeros((output_dims, input_dims * bits // 32), mx.uint32)
        self.scales = mx.ones((output_dims, input_dims // group_size))
        self.biases = mx.zeros((output_dims, input_dims // group_size))
        self.signs = mx.ones((input_dims,))
        self.freeze()

    def unfreeze(self, *args: object, **kwargs: object) -> nn.Module:
        """Trains nothing, as for any layer in codes."""
        return self

    @property
    def dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = self.scales.dtype
        return dtype

    @property
    def group_size(self) -> int:
        return self.block

    def alike(self) -> tuple[Any, ...]:
        return "rotated", self.dtype, self.codes_group, self.bits, self.block

    def _product(self, x: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return self._of_rotated(hadamard(x, self.block, self.signs), scales, biases)

    def of_rotated(self, x: mx.array) -> mx.array:
        """The result for an input that is rotated already."""
        return self._of_rotated(x, self["scales"], self["biases"])

    def _of_rotated(self, rotated: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        format = AffineFormat(scales, biases, self.codes_group, self.bits)
        return affine_product(rotated, self["weight"], format)

    def multiply(self, x: mx.array) -> mx.array:
        floats = (part.astype(mx.float32) for part in (x, self.scales, self.biases))
        return self._product(*floats)

    def written_out(self, parts: Mapping[str, mx.array]) -> mx.array:
        scales, biases = (parts[key].astype(mx.float32) for key in ("scales", "biases"))
        rows = mx.dequantize(parts["weight"], scales, biases, self.codes_group, self.bits)
        return hadamard(rows, self.block, parts["signs"], inverse=True)

    def is_made_of(self, array: mx.array) -> bool:
        rotated = hadamard(array.astype(mx.float32), self.block, self.signs)
        codes = mx.quantize(rotated.astype(self.dtype), self.codes_group, self.bits)
        return all(map(mx.array_equal, codes, (self.weight, self.scales, self.biases)))

    def _extra_repr(self) -> str:
        return (
            f"input_dims={self.input_dims}, output_dims={self.output_dims}, "
            f"group_size={self.codes_group}, bits={self.bits}, block={self.block}"
        )

    def __call__(self, x: mx.array) -> mx.array:
        return self._product(x, self["scales"], self["biases"])


class RotatedEmbedding(RotatedLinear):
    r"""An embedding in the same format, whose rows are rotated back.

    .. math::
        e_t = \mathrm{H}(Q_t) \odot s

    Args:
        num_embeddings: Tokens.
        dims: Dims of a row.
        group_size, bits, block: As of `RotatedLinear`.

    Shape:
        Tokens `(...)`, result `(..., dims)`.

    Example:
        >>> layer = RotatedEmbedding(10, 128, group_size=128, bits=2, block=64)
        >>> layer(mx.array([[1, 2, 3]])).shape
        (1, 3, 128)
    """

    is_embedding = True

    def __init__(self, num_embeddings: int, dims: int, *, group_size: int, bits: int, block: int):
        super().__init__(dims, num_embeddings, group_size=group_size, bits=bits, block=block)

    def __call__(self, tokens: mx.array) -> mx.array:
        words, scales, biases = (self[key][tokens] for key in ("weight", "scales", "biases"))
        rows = mx.dequantize(words, scales, biases, self.codes_group, self.bits)
        return hadamard(rows, self.block, self["signs"], inverse=True)

    def as_linear(self, x: mx.array) -> mx.array:
        """The product with the matrix, as a tied head computes it."""
        return self._product(x, self["scales"], self["biases"])
