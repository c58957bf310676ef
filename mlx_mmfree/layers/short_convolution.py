"""Depthwise causal convolution over a few neighbouring positions, with carried inputs."""

import math

import mlx.core as mx
import mlx.nn as nn

from .arguments import check_sizes
from .sample_starts import sample_begins


class ShortConvolution(nn.Module):
    r"""Causal depthwise convolution followed by SiLU.

    .. math::
        y_t = \mathrm{silu}\Big(\sum_{k=0}^{K-1} w_k \odot x_{t-K+1+k}\Big)

    The last tap lies on the current position; positions before the first are zero, or the ones
    carried in the state. At a position of `starts` a new sample begins: those before are zero to it.

    Args:
        dims: Number of channels `D`.
        kernel_size: Number of taps `K`.

    Shape:
        `x` and result `(B, L, D)`; state `(B, K - 1, D)`, the last inputs.
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
        self,
        x: mx.array,
        state: mx.array,
        valid: mx.array | None = None,
        starts: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        length, kernel_size = x.shape[1], self.weight.shape[-1]
        if valid is not None:
            x = mx.where(valid[..., None], x, mx.zeros((), x.dtype))
        window = mx.concatenate([state, x], axis=1)
        taps = [window[:, tap : tap + length] for tap in range(kernel_size)]
        last = window[:, length:]
        if starts is not None:
            begins = sample_begins(starts, kernel_size - 1)[..., None]
            place, zero = mx.arange(window.shape[1])[:, None], mx.zeros((), x.dtype)
            taps = [
                mx.where(place[tap : tap + length] >= begins, seen, zero)
                for tap, seen in enumerate(taps)
            ]
            last = mx.where(place[length:] >= begins[:, -1:], last, zero)
        y = self.weight[:, 0, 0] * taps[0]
        for tap in range(1, kernel_size):
            y = y + self.weight[:, 0, tap] * taps[tap]
        return nn.silu(y), last
