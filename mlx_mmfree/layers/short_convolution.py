"""Depthwise causal convolution over a few neighbouring positions, with carried inputs."""

import math

import mlx.core as mx
import mlx.nn as nn

from ..ops.activations import silu
from ..ops.gated_delta_net import causal_taps, weighted_taps
from .arguments import check_sizes
from .context import Context, sample_begins


class ShortConvolution(nn.Module):
    r"""Causal depthwise convolution followed by SiLU.

    .. math::
        y_t = \mathrm{silu}\Big(b + \sum_{k=0}^{K-1} w_k \odot x_{t-K+1+k}\Big)

    The last tap lies on the current position; positions before the first are zero, or the ones
    carried in the state. At a position of `starts` a new sample begins: those before are zero to it.
    Taps and state pass over padding, where the result is zero.

    Source: the convolution of Mamba (Gu and Dao, arXiv 2312.00752), as flash-linear-attention has it.

    Args:
        dims: Number of channels `D`.
        kernel_size: Number of taps `K`.
        bias: Whether there is a bias `b`.
        activation: Whether SiLU follows.

    Shape:
        `x` and result `(B, L, D)`; state `(B, K - 1, D)`, the last inputs.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive.

    Example:
        >>> convolution = ShortConvolution(8, 4)
        >>> state = convolution.init_state(1, mx.float32)
        >>> y, state = convolution(mx.ones((1, 5, 8)), state)
        >>> y.shape, state.shape
        ((1, 5, 8), (1, 3, 8))
    """

    def __init__(self, dims: int, kernel_size: int, *, bias: bool = False, activation: bool = True):
        super().__init__()
        check_sizes("ShortConvolution", dims=dims, kernel_size=kernel_size)
        bound = math.sqrt(1.0 / kernel_size)
        # (D, 1, K), the shape that checkpoints hold.
        self.weight = mx.random.uniform(-bound, bound, (dims, 1, kernel_size))
        if bias:
            self.bias = mx.zeros((dims,))
        self._has_activation = activation

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> mx.array:
        dims, _, kernel_size = self.weight.shape
        return mx.zeros((batch_size, kernel_size - 1, dims), dtype)

    def __call__(
        self, x: mx.array, state: mx.array, context: Context | None = None
    ) -> tuple[mx.array, mx.array]:
        weight, bias = self["weight"], self.get("bias")
        y, last = convolve(x, weight, state, context, bias=bias)
        return silu(y) if self._has_activation else y, last


def convolve(
    x: mx.array,
    weight: mx.array,
    state: mx.array,
    context: Context | None = None,
    *,
    bias: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The convolution of a `ShortConvolution` before its activation.

    Args:
        x: `(B, L, D)`.
        weight: Taps `(D, 1, K)`, of one convolution or of several whose channels lie side by side.
        state: The last inputs before, `(B, K - 1, D)`.
        context: The tokens of the call.
        bias: `(D,)`.

    Returns:
        `(B, L, D)`, zero where padded, and the last inputs.
    """
    given = Context() if context is None else context
    x, context = given.padding_moved(x), given.with_padding_last()
    counts, starts = context.counts, context.starts
    length, kernel_size = x.shape[1], weight.shape[-1]
    window = mx.concatenate([state, x], axis=1)
    taps = causal_taps(window, weight, length)

    def last_taps() -> mx.array:
        key = ("last inputs", length, kernel_size)
        return context.memoised(key, lambda: _last_positions(counts, length, kernel_size))

    last = window[:, length:] if counts is None else mx.take_along_axis(window, last_taps(), axis=1)
    if starts is not None:
        *masks, is_last = context.memoised(
            ("taps", length, kernel_size), lambda: _same_sample(starts, last_taps(), kernel_size)
        )
        zero = mx.zeros((), x.dtype)
        taps = [mx.where(mask, seen, zero) for mask, seen in zip(masks, taps, strict=True)]
        last = mx.where(is_last, last, zero)
    y = weighted_taps(taps, weight)
    return given.padding_moved_back(y if bias is None else y + bias), last


def shift_state(batch_size: int, dims: int, dtype: mx.Dtype) -> mx.array:
    """The input before the first, zeros `(B, 1, D)`."""
    return mx.zeros((batch_size, 1, dims), dtype)


def shifted(x: mx.array, before: mx.array, context: Context) -> tuple[mx.array, mx.array]:
    """The input before each position.

    Args:
        x: `(B, L, D)`.
        before: The last input before, `(B, 1, D)`.
        context: The tokens of the call.

    Returns:
        `(B, L, D)`, zero at the first position of a sample and where padded, and the last input.
    """
    taps = mx.broadcast_to(mx.array([1.0, 0.0], x.dtype), (x.shape[-1], 1, 2))
    return convolve(x, taps, before, context)


def _last_positions(counts: mx.array | None, length: int, kernel_size: int) -> mx.array:
    """Where the last inputs stand among the carried ones and the call's, `(B, K - 1, 1)`."""
    count = length if counts is None else counts[:, None, None]
    return mx.arange(kernel_size - 1)[:, None] + count


def _same_sample(starts: mx.array, last_positions: mx.array, kernel_size: int) -> list[mx.array]:
    """Where each tap, and what is carried on, sees the sample of its position, `(B, ..., 1)`."""
    length, before = starts.shape[1], kernel_size - 1
    begins = sample_begins(starts, before)[..., None]
    position = mx.arange(before + length)[:, None]
    masks = [position[tap : tap + length] >= begins for tap in range(kernel_size)]
    return [*masks, last_positions >= begins[:, -1:]]
