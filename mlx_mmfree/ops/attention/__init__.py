"""Scaled dot-product attention with shared key and value heads."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from ..backend import dispatch
from ..backend.cost import Call, Cost, meeting, softmax_work, work
from ..backend.dispatch import FLOATS, Arrays, Backend, Example, Operation, native_kernel
from ..backend.gradient import traces_gradients
from . import metal_gradient
from .definition import Mask as Mask
from .definition import chunked, reference


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
    if queries.size == 0:
        _check(queries, keys, values, mask, bias, sinks)
        return mx.zeros((*queries.shape[:3], values.shape[3]), queries.dtype)
    y: mx.array = operation(queries, keys, values, mask, bias, sinks)
    return y


def _check(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    bias: mx.array | None = None,
    sinks: mx.array | None = None,
) -> None:
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


def _of_mlx(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    bias: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """MLX's fused kernels, in the dtype of the arguments.

    While gradients are traced, MLX 0.32 computes plain operations on Metal, which it calls faster for
    training. They keep the weights of all keys for each query. On CUDA it has a fused gradient.
    """
    dtype, (length, dims), count = queries.dtype, queries.shape[2:], keys.shape[2]
    if bias is not None:
        if isinstance(mask, str):
            mask = mx.arange(count) <= mx.arange(count - length, count)[:, None]
        bias = bias.astype(dtype)
        mask = bias if mask is None else mx.where(mask, bias, mx.array(-mx.inf, dtype))
    return mx.fast.scaled_dot_product_attention(
        queries,
        keys.astype(dtype),
        values.astype(dtype),
        scale=dims**-0.5,
        mask=mask,
        sinks=None if sinks is None else sinks.astype(dtype),
    )


def _metal(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    bias: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """MLX's fused kernels, and the ones of `metal_gradient` while gradients are traced.

    Then MLX 0.32 has no fused kernel, and would keep the weights of all keys for each query. It still
    computes what the own kernels do not take: fewer than 16 queries, heads of more than 128 dims, a bias
    and a mask that is not boolean.
    """
    if _is_trained(queries, values, mask, bias):
        return metal_gradient.run(queries, keys, values, mask, sinks)
    return _of_mlx(queries, keys, values, mask, bias, sinks)


def _metal_unsupported(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    bias: mx.array | None = None,
    sinks: mx.array | None = None,
) -> str | None:
    if not _is_trained(queries, values, mask, bias):
        return None
    return dispatch.not_floats(queries, keys, values, sinks) or metal_gradient.fault(
        queries, values, mask, sinks
    )


def _is_trained(queries: mx.array, values: mx.array, mask: Mask, bias: mx.array | None) -> bool:
    return metal_gradient.takes(queries, values, mask, bias) and traces_gradients()


def _native(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    bias: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """C++, in which tiles of queries meet runs of keys, and no score leaves the cache.

    This holds for the gradient too, which makes the weights of each tile anew. A query that sees nothing
    adds nothing to it.
    """
    if bias is not None or sinks is not None:
        raise ValueError("[attention] the kernel takes no 'bias' and no 'sinks'.")
    seen = mask if isinstance(mask, mx.array) else None
    y: mx.array = _kernel()(
        queries, keys, values, seen, mask == "causal" if seen is None else False
    )
    return y


def _native_unsupported(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    bias: mx.array | None = None,
    sinks: mx.array | None = None,
) -> str | None:
    if bias is not None or sinks is not None:
        return "there is a bias or a sink"
    for array in (queries, keys, values):
        if array.dtype not in FLOATS:
            return f"an argument is {array.dtype}"
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        return f"'mask' is {mask.dtype}"
    return None


def _gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    queries, keys, values, mask, _, _, cotangent = arrays

    def definition(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        return chunked(queries, keys, values, "causal" if options[0] else mask)

    gradients: list[mx.array] = mx.vjp(definition, [queries, keys, values], [cotangent])[1]
    return gradients


def _cost(call: Call) -> Cost:
    q, k, v, *_ = call.inputs
    batch, heads, length, dims = q.shape
    known, value_dims = k.shape[2], v.shape[3]
    scores = meeting(length, dims, known, batch * heads, (0, 1))
    mixed = meeting(length, known, value_dims, batch * heads, (0, 2))
    weights = softmax_work(batch * heads * length * known)
    return Cost(scores.work + mixed.work + weights + work(multiply=q.size), (scores, mixed))


def _examples() -> Iterator[Example]:
    for dtype in FLOATS:
        x = mx.zeros((1, 1, 16, 64), dtype)
        yield Example((x, x, x, "causal"))
        yield Example((x, x, x, "causal"), is_trained=True)
    x, seen, sinks = mx.zeros((1, 1, 16, 64)), mx.ones((16, 16), mx.bool_), mx.zeros((1,))
    for mask, given in ((None, None), (seen, None), ("causal", sinks), (seen, sinks)):
        yield Example((x, x, x, mask), {"sinks": given}, is_trained=True)


_kernel = native_kernel("attention", _gradient)
operation = Operation(
    "attention",
    _examples,
    check=_check,
    costs={"Attention": _cost},
    metal=Backend(_metal, _metal_unsupported),
    cuda=_of_mlx,
    native=Backend(_native, _native_unsupported, refuses=True),
    chunked=chunked,
    reference=reference,
)
