"""Scaled dot-product attention with shared key and value heads."""

from typing import Literal

import mlx.core as mx

from ..backend.dispatch import dispatch

Mask = mx.array | Literal["causal"] | None


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask = None,
    *,
    bias: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    r"""Softmax attention in which several query heads may share a key and value head.

    .. math::
        a_{t,j,h} &= q_{t,h}^\top k_{j,g(h)} / \sqrt{K} + b_{t,j,h},
        \quad g(h) = \lfloor h\,G / H \rfloor \\
        y_{t,h} &= \sum_j \frac{e^{a_{t,j,h}}}{e^{s_h} + \sum_i e^{a_{t,i,h}}}\,v_{j,g(h)}

    Without sinks the first term of the denominator is missing, so that the weights are a softmax.
    Computed in float32, but by MLX's kernels of a GPU in the dtype of the queries. Sources: attention
    (Vaswani et al., arXiv 1706.03762), and shared heads (Ainslie et al., arXiv 2305.13245).

    Args:
        queries: `(B, H, L, K)`, any float dtype.
        keys: `(B, G, N, K)`, `G` a divisor of `H`.
        values: `(B, G, N, V)`.
        mask: What each query sees. Booleans broadcast to `(B, 1, L, N)`, `"causal"` stands for
            `j <= t + N - L`, and `None` for everything. A query that sees nothing gives NaN, or 0
            with sinks.
        bias: Numbers :math:`b` that broadcast to `(B, H, L, N)`, any float dtype.
        sinks: Logits :math:`s` of weight that goes nowhere, `(H,)`, any float dtype.

    Returns:
        `(B, H, L, V)` in the dtype of the queries.

    Raises:
        ValueError: The shapes do not agree, or heads, their dims or keys are missing.

    Example:
        >>> queries, keys = mx.zeros((1, 2, 2, 8)), mx.zeros((1, 1, 4, 8))
        >>> values = mx.array([[[[0.0], [3.0], [6.0], [11.0]]]])
        >>> y = attention(queries, keys, values, "causal")
        >>> [round(n, 3) for n in y[0, 1].flatten().tolist()]
        [3.0, 5.0]
    """
    _check(queries, keys, values)
    _check_scores(queries, keys, mask, bias, sinks)
    if queries.size == 0:
        return mx.zeros((*queries.shape[:3], values.shape[3]), queries.dtype)
    y: mx.array = dispatch(__name__, queries, keys, values, mask, bias, sinks)
    return y


def _check(queries: mx.array, keys: mx.array, values: mx.array) -> None:
    arrays = (queries, keys, values)
    shapes = ", ".join(str(array.shape) for array in arrays)
    if any(array.ndim != 4 or 0 in (array.shape[1], array.shape[3]) for array in arrays) or (
        keys.shape[2] == 0
    ):
        raise ValueError(
            "[attention] 'queries', 'keys' and 'values' must have heads of one dim at least, and one "
            f"key at least, but got shapes {shapes}."
        )
    if queries.shape[1] % keys.shape[1]:
        raise ValueError(
            f"[attention] 'keys' must have a number of heads that divides {queries.shape[1]} but got "
            f"{keys.shape[1]}."
        )
    batch, _, _, dims = queries.shape
    if (keys.shape[0], keys.shape[3]) != (batch, dims) or values.shape[:3] != keys.shape[:3]:
        raise ValueError(
            "[attention] 'queries', 'keys' and 'values' must have shapes (B, H, L, K), (B, G, N, K) "
            f"and (B, G, N, V) but got {shapes}."
        )


def _check_scores(
    queries: mx.array,
    keys: mx.array,
    mask: Mask,
    bias: mx.array | None,
    sinks: mx.array | None,
) -> None:
    scores = (*queries.shape[:3], keys.shape[2])
    seen = (scores[0], 1, *scores[2:])
    if isinstance(mask, mx.array) and not _broadcasts(mask.shape, seen):
        raise ValueError(
            f"[attention] 'mask' must broadcast to (B, 1, L, N) = {seen} but got shape {mask.shape}."
        )
    if bias is not None and (bias.ndim != 4 or not _broadcasts(bias.shape, scores)):
        raise ValueError(
            f"[attention] 'bias' must broadcast to (B, H, L, N) = {scores} with four axes of its own "
            f"but got shape {bias.shape}."
        )
    if sinks is not None and sinks.shape != scores[1:2]:
        raise ValueError(
            f"[attention] 'sinks' must have shape ({scores[1]},) but got {sinks.shape}."
        )


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    last = to[len(to) - len(shape) :]
    return len(shape) <= len(to) and all(
        size in (1, want) for size, want in zip(shape, last, strict=True)
    )
