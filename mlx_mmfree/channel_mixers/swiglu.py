"""SwiGLU feed-forward (Shazeer, arXiv 2002.05202)."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn


class SwiGLU(nn.Module):
    r"""Gated feed-forward.

    .. math::
        y = W_\mathrm{down}\,(\mathrm{silu}(W_\mathrm{gate}\,x) \odot W_\mathrm{up}\,x)

    Args:
        dims: Model dims `D`.
        hidden_dims: Width between the projections. Default: `8 * dims / 3`, rounded up to a multiple
            of 256.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=False)`.
        is_stacked: Gate and up are the halves of one projection, gate first; with ternary weights
            they then share one scale.

    Shape:
        `x` and `y`: `(..., D)`.

    Example:
        >>> SwiGLU(64, hidden_dims=128)(mx.ones((1, 3, 64))).shape
        (1, 3, 64)
    """

    def __init__(
        self,
        dims: int,
        *,
        hidden_dims: int | None = None,
        linear: Callable[..., nn.Module] = nn.Linear,
        is_stacked: bool = False,
    ):
        super().__init__()
        hidden_dims = default_hidden_dims(dims) if hidden_dims is None else hidden_dims
        if is_stacked:
            self.gate_up_proj = linear(dims, 2 * hidden_dims, bias=False)
        else:
            self.gate_proj = linear(dims, hidden_dims, bias=False)
            self.up_proj = linear(dims, hidden_dims, bias=False)
        self.down_proj = linear(hidden_dims, dims, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        if "gate_up_proj" in self:
            gate, up = mx.split(self.gate_up_proj(x), 2, axis=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        y: mx.array = self.down_proj(nn.silu(gate) * up)
        return y


def default_hidden_dims(dims: int, ratio: float = 4) -> int:
    """`dims * ratio * 2 / 3`, rounded up to a multiple of 256."""
    return 256 * -(-int(dims * ratio * 2 / 3) // 256)
