"""MLX's linears of floats and of codes, by the operations of this library."""

from typing import Any, ClassVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..ops import linear_product
from ..ops.linear_product import add_bias
from .fusing import Floats, Fusable, Variant
from .matrix import Model, affine_format, affine_product, matrices


class QuantizedLinear(Fusable, nn.QuantizedLinear):
    r"""`nn.QuantizedLinear`, :math:`y = x W^\top + b`, in a fiftieth of the time on a CPU.

    What `dense_matmul` does not know, as other modes than `affine`, MLX computes.

    Args:
        input_dims: Size of the last axis of the input.
        output_dims: Size of the last axis of the result.
        bias: Whether a bias is added.
        group_size: Neighbouring inputs that share a scale; `None`: MLX's default.
        bits: Bits of a code; `None`: MLX's default.
        mode: How `mx.quantize` holds the matrix.

    Shape:
        Input `(..., input_dims)`, result `(..., output_dims)`.

    Example:
        >>> QuantizedLinear(64, 32, group_size=32, bits=4)(mx.ones((2, 64))).shape
        (2, 32)
    """

    is_ordinary = True

    def __call__(self, x: mx.array) -> mx.array:
        format = affine_format(self)
        if format is None:
            y: mx.array = super().__call__(x)
            return y
        y = affine_product(x, self["weight"], format)
        return add_bias(y, self["bias"]) if "bias" in self else y


class Linear(Fusable, nn.Linear):
    r"""`nn.Linear`, :math:`y = x W^\top + b`, with a gradient that is laid out as the weight is.

    Args:
        input_dims: Size of the last axis of the input.
        output_dims: Size of the last axis of the result.
        bias: Whether a bias is added.

    Attributes:
        coded: The class of its format in codes.

    Shape:
        Input `(..., input_dims)`, result `(..., output_dims)`.

    Example:
        >>> Linear(64, 32)(mx.ones((2, 64))).shape
        (2, 32)
    """

    variant: ClassVar[type[Variant]] = Floats
    is_ordinary = True
    coded: ClassVar[type[nn.QuantizedLinear]] = QuantizedLinear

    def __call__(self, x: mx.array) -> mx.array:
        return linear_product(x, self["weight"], self.get("bias"))

    def to_quantized(
        self,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
        quantize_input: bool = False,
    ) -> nn.Module:
        """The same as of `nn.Linear`; without quantised inputs, a `QuantizedLinear` of this library."""
        if quantize_input:
            return super().to_quantized(group_size, bits, mode, quantize_input)
        make: Any = self.coded.from_linear
        return cast(nn.Module, make(self, group_size, bits, mode))


def in_floats(model: Model) -> Model:
    """The model with float32 matrices in the place of codes, in place.

    Example:
        >>> from mlx.nn import Sequential
        >>> model = in_floats(Sequential(QuantizedLinear(64, 32)))
        >>> model.layers[0].weight.shape
        (32, 64)
    """
    found: list[tuple[str, nn.Module]] = []
    for path, matrix in matrices(model).items():
        if matrix.holds_codes:
            given: Any = matrix.layer
            layer = nn.Embedding(1, 1) if matrix.is_embedding else Linear(1, 1, "bias" in given)
            layer.weight = matrix.written_out(given)
            if "bias" in given:
                layer.bias = given.bias
            found.append((path, layer))
    model.update_modules(tree_unflatten(found))
    return model
