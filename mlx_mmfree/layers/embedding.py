"""The first layer of a language model and its last: rows of tokens, and logits."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..ops import dense_matmul, linear_product
from ..ops.device import with_reference_gradient
from ..ops.linear_product import add_bias
from .arguments import check_array
from .matrix import affine_format, matrix_of

# A common token adds up thousands of rows; in bfloat16 a sum stops growing at 256 times what is added.
_rows = with_reference_gradient(
    lambda weight, tokens: weight[tokens],
    lambda weight, tokens: weight.astype(mx.float32)[tokens].astype(weight.dtype),
)


def embed_tokens(embed: nn.Module, tokens: mx.array, scale: float = 1.0) -> mx.array:
    """Applies an embedding.

    Args:
        embed: `nn.Embedding`, or what takes its place.
        tokens: Integers `(...)`.
        scale: What the rows are multiplied by.

    Returns:
        `(..., D)`.
    """
    if tokens.size == 0:
        # MLX writes out no row of codes
        row = embed_tokens(embed, mx.zeros((1,), tokens.dtype))
        return mx.zeros((*tokens.shape, row.shape[-1]), row.dtype)
    matrix = matrix_of(embed)
    is_short = matrix is not None and matrix.is_plain and matrix.dtype != mx.float32
    rows: Any = _rows(embed.weight, tokens) if is_short else embed(tokens)
    result: mx.array = rows if scale == 1.0 else rows * scale
    return result


def known_rows(embedding: nn.Module, tokens: mx.array, scale: float = 1.0) -> mx.array:
    """The embedding's rows of `tokens`; NaN for those that it has no row for.

    An array may not be computed yet, and to look into it would wait for it. So a token outside the
    vocabulary is no error here, but neither is it read out of bounds: what follows from it is NaN.

    Args:
        embedding: Rows `(V, D)`.
        tokens: Integers `(B, L)`.
        scale: As of `embed_tokens`.

    Returns:
        `(B, L, D)`.

    Raises:
        TypeError: The tokens are no integers.
        ValueError: They have another number of axes.
    """
    check_array("Decoder", tokens, "tokens")
    if not mx.issubdtype(tokens.dtype, mx.integer):
        raise TypeError(f"[Decoder] 'tokens' must be integers but got {tokens.dtype}.")
    if tokens.ndim != 2:
        hint = " Add a batch axis: tokens[None]." if tokens.ndim == 1 else ""
        raise ValueError(
            "[Decoder] 'tokens' must have the two axes (batch, length) but got shape "
            f"{tokens.shape}.{hint}"
        )
    is_known = mx.logical_and(tokens >= 0, tokens < embedding.weight.shape[0])
    rows = embed_tokens(embedding, mx.where(is_known, tokens, mx.zeros_like(tokens)), scale)
    return mx.where(is_known[..., None], rows, mx.array(mx.nan, rows.dtype))


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
    matrix = matrix_of(head)
    is_matrix = matrix is not None and matrix.is_plain
    if is_matrix and head.weight.dtype == mx.float32 and "bias" not in head:
        return linear_product(x, head.weight)
    is_plain = is_matrix and head.weight.dtype != mx.float32
    is_coded = matrix is not None and matrix.holds_codes and matrix.alike() is not None
    format = affine_format(head) if is_coded else None
    if not is_plain and format is None:
        y: mx.array = head.as_linear(x) if hasattr(head, "as_linear") else head(x)
        return y
    y = dense_matmul(x, head.weight, format, dtype=x.dtype)
    return add_bias(y, head.bias) if "bias" in head else y


class TokenLayers(nn.Module):
    """The two layers of a model that know its tokens: the embedding, and the head that gives logits.

    Attributes:
        embed: The embedding, `(V, D)`.
        head: Maps `(..., D)` to `(..., V)`; left out where it is tied to the embedding.
        vocab_size: Number of tokens V.
        embed_scale: What embedded tokens are multiplied by.
        hidden_scale: What the head gets the normed residual stream times.
    """

    vocab_size: int
    embed_scale: float = 1.0
    hidden_scale: float = 1.0

    @property
    def dims(self) -> int:
        """Model dims D."""
        matrix = matrix_of(self.embed)
        return int(self.embed.weight.shape[1]) if matrix is None else matrix.input_dims

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the residual stream."""
        return self.embed(mx.zeros((1,), mx.int32)).dtype

    @property
    def num_logits(self) -> int:
        """How many logits the head gives at a time."""
        return self.vocab_size

    @property
    def head_modules(self) -> list[nn.Module]:
        """The modules whose parameters the logits depend on."""
        if "head" not in self:
            return [self.embed]
        matrix = matrix_of(self.head)
        is_shared = matrix is None or matrix.is_shared
        return [self.embed, self.head] if is_shared else [self.head]

    def logits(self, hidden: mx.array) -> mx.array:
        """The head, applied to the normed residual stream."""
        hidden = hidden if self.hidden_scale == 1.0 else hidden * self.hidden_scale
        return apply_head(self.head if "head" in self else self.embed, hidden)
