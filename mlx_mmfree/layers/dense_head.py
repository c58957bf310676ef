"""A head of floats or codes: a linear layer, or an embedding used backwards."""

import mlx.core as mx
import mlx.nn as nn

from ..ops import AffineForm, dense_matmul, linear_product
from ..ops.dense_matmul import BITS, GROUP_SIZES


def apply_head(head: nn.Module, x: mx.array) -> mx.array:
    r"""Applies a linear layer, or the transpose of an embedding, whose outputs are many.

    .. math::
        y = x\,W^\top + b

    MLX's own products of 16-bit floats and of codes are slow on a CPU; these go to `dense_matmul`.

    Args:
        head: A linear layer, or an embedding with `as_linear`.
        x: `(..., D)`.

    Returns:
        `(..., V)` in the dtype of `x`.

    Example:
        >>> apply_head(nn.Embedding(1000, 8), mx.ones((1, 3, 8))).shape
        (1, 3, 1000)
    """
    is_matrix = type(head) in (nn.Linear, nn.Embedding)
    if is_matrix and head.weight.dtype == mx.float32 and "bias" not in head:
        return linear_product(x, head.weight)
    is_plain = is_matrix and head.weight.dtype != mx.float32
    if not is_plain and not _is_affine(head):
        y: mx.array = head.as_linear(x) if hasattr(head, "as_linear") else head(x)
        return y
    quantization = None
    if not is_plain:
        quantization = AffineForm(head.scales, head.biases, head.group_size, head.bits)
    y = dense_matmul(x, head.weight, quantization).astype(x.dtype)
    return y + head.bias if "bias" in head else y


def _is_affine(head: nn.Module) -> bool:
    return (
        type(head) in (nn.QuantizedLinear, nn.QuantizedEmbedding)
        and head.mode == "affine"
        and head.bits in BITS
        and head.group_size in GROUP_SIZES
    )
