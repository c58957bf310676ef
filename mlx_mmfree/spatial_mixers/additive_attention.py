"""One global query for all keys, the mixer of SwiftFormer (Shaker et al., arXiv 2303.15446)."""

from typing import ClassVar

import mlx.core as mx

from ..layers.arguments import check_sizes
from ..layers.dense import Linear
from ..layers.mixer import Linears, SpatialMixer, factory_of
from ..ops import long_sum

_EPS = 1e-12


class AdditiveAttention(SpatialMixer):
    r"""Keys are multiplied by one sum of all queries.

    .. math::
        G = \sum_t \alpha_t\,\hat q_t, \quad
        \alpha = a / \max(\lVert a \rVert_2, 10^{-12}), \quad a_t = \hat q_t \cdot w / \sqrt D, \quad
        y_t = W_o\,\big(W_p (G \odot \hat k_t) + \hat q_t\big)

    where the hat divides by the length over the channels. The paper writes a softmax in place of the
    norm of `a`; the code of the published models has this norm. The first code took a softmax over an
    axis of one number: all weights are 1, as in transformers, whose checkpoints need `weights="ones"`.

    Source: Shaker et al., arXiv 2303.15446.

    Args:
        dims: Dims `D`.
        num_heads: How many times as wide queries and keys are; there is one weight for a position
            all the same.
        weights: "norm", or "ones" for :math:`\alpha = 1`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.

    Shape:
        `x` and `y`: `(B, H, W, D)`; `query_weight`: `(num_heads D, 1)`, :math:`w`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size or an input does not fit. The word for the weights is unknown.

    Example:
        >>> AdditiveAttention(32)(mx.zeros((1, 5, 4, 32))).shape
        (1, 5, 4, 32)
    """

    equation: ClassVar[str] = "y_t = W_o (W_p (G * k_t) + q_t), G = sum_t a_t q_t"
    complexity: ClassVar[str] = "T D"
    paper: ClassVar[str] = "arXiv 2303.15446"

    def __init__(
        self, dims: int, *, num_heads: int = 1, weights: str = "norm", linear: Linears = Linear
    ):
        super().__init__()
        check_sizes("AdditiveAttention", dims=dims, num_heads=num_heads)
        if weights not in ("norm", "ones"):
            raise ValueError(
                f"[AdditiveAttention] 'weights' must be 'norm' or 'ones' but got {weights!r:.80}."
            )
        width = num_heads * dims
        self._dims = dims
        self._has_weights = weights == "norm"
        inner = {"query_proj": [width], "key_proj": [width]}
        self.make_projections(dims, inner, linear, bias=True)
        self.inner_proj = factory_of(linear, "inner_proj")(width, width, bias=True)
        self.make_output(width, dims, linear, bias=True)
        self.query_weight = mx.random.normal((width, 1))

    def mix(self, q: mx.array, k: mx.array) -> mx.array:
        shape, dtype = q.shape, q.dtype
        q, k = (_unit(mx.flatten(part, 1, 2).astype(mx.float32)) for part in (q, k))
        summed = q
        if self._has_weights:
            a = q @ (self.query_weight.astype(mx.float32) * self._dims**-0.5)
            summed = q * (a / _length(long_sum(a.square(), axis=-2)[:, None]))
        whole = long_sum(summed, axis=-2)[:, None]
        y: mx.array = self.inner_proj((whole * k).astype(dtype)) + q.astype(dtype)
        return y.reshape(shape)


def _unit(x: mx.array) -> mx.array:
    """Vectors of length 1 over the channels."""
    return x / _length(x.square().sum(axis=-1, keepdims=True))


def _length(squares: mx.array) -> mx.array:
    # the larger of two squares, since the root of 0 has no gradient
    return mx.sqrt(mx.maximum(squares, _EPS**2))
