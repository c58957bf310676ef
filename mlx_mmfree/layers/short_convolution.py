"""Depthwise causal convolution over a few neighbouring positions, with carried inputs."""

import math

import mlx.core as mx
import mlx.nn as nn

from ..ops.activations import silu
from .arguments import check_sizes
from .context import Context, RealTokens, read_without_padding, sample_begins


class ShortConvolution(nn.Module):
    r"""Causal depthwise convolution followed by SiLU.

    .. math::
        y_t = \mathrm{silu}\Big(\sum_{k=0}^{K-1} w_k \odot x_{t-K+1+k}\Big)

    The last tap lies on the current position; positions before the first are zero, or the ones
    carried in the state. At a position of `starts` a new sample begins: those before are zero to it.
    Taps and state pass over padding, where the result is zero.

    Source: the convolution of Mamba (Gu and Dao, arXiv 2312.00752), as flash-linear-attention has it.

    Args:
        dims: Number of channels `D`.
        kernel_size: Number of taps `K`.

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

    def __init__(self, dims: int, kernel_size: int):
        super().__init__()
        check_sizes("ShortConvolution", dims=dims, kernel_size=kernel_size)
        bound = math.sqrt(1.0 / kernel_size)
        # (D, 1, K), the shape that checkpoints hold.
        self.weight = mx.random.uniform(-bound, bound, (dims, 1, kernel_size))

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> mx.array:
        dims, _, kernel_size = self.weight.shape
        return mx.zeros((batch_size, kernel_size - 1, dims), dtype)

    def __call__(
        self, x: mx.array, state: mx.array, context: Context | None = None
    ) -> tuple[mx.array, mx.array]:
        context = Context() if context is None else context
        return read_without_padding(
            x, context, lambda x, tokens: self._read(x, tokens, state, context)
        )

    def _read(
        self, x: mx.array, tokens: RealTokens, state: mx.array, context: Context
    ) -> tuple[mx.array, mx.array]:
        length, kernel_size = x.shape[1], self.weight.shape[-1]
        window = mx.concatenate([state, x], axis=1)
        taps = [window[:, tap : tap + length] for tap in range(kernel_size)]

        def places() -> mx.array:
            key = ("last inputs", length, kernel_size)
            return context.once(key, lambda: _last_places(tokens, length, kernel_size))

        if tokens.counts is None:
            last = window[:, length:]
        else:
            last = mx.take_along_axis(window, places(), axis=1)
        starts = tokens.starts
        if starts is not None:
            *masks, is_last = context.once(
                ("taps", length, kernel_size), lambda: _same_sample(starts, places(), kernel_size)
            )
            zero = mx.zeros((), x.dtype)
            taps = [mx.where(mask, seen, zero) for mask, seen in zip(masks, taps, strict=True)]
            last = mx.where(is_last, last, zero)
        y = self.weight[:, 0, 0] * taps[0]
        for tap in range(1, kernel_size):
            y = y + self.weight[:, 0, tap] * taps[tap]
        return silu(y), last


def _last_places(tokens: RealTokens, length: int, kernel_size: int) -> mx.array:
    """Where the last inputs stand among those carried and those of the call, `(B, K - 1, 1)`."""
    count = length if tokens.counts is None else tokens.counts[:, None, None]
    return mx.arange(kernel_size - 1)[:, None] + count


def _same_sample(starts: mx.array, last_places: mx.array, kernel_size: int) -> list[mx.array]:
    """Where each tap, and what is carried on, sees the sample of its position, `(B, ..., 1)`."""
    length, before = starts.shape[1], kernel_size - 1
    begins = sample_begins(starts, before)[..., None]
    place = mx.arange(before + length)[:, None]
    masks = [place[tap : tap + length] >= begins for tap in range(kernel_size)]
    return [*masks, last_places >= begins[:, -1:]]
