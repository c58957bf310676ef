"""Attention between channels instead of positions (XCiT, El-Nouby et al., arXiv 2106.09681)."""

from typing import ClassVar

import mlx.core as mx

from ..layers.arguments import dims_of_a_head
from ..layers.dense import Linear
from ..layers.linear import merge_heads, split_heads
from ..layers.matrix import StoredLayout
from ..layers.mixer import Linears, SpatialMixer
from ..ops import long_sum

_PROJECTIONS = ("query_proj", "key_proj", "value_proj")
_EPS = 1e-12


class CrossCovarianceAttention(SpatialMixer):
    r"""Softmax attention whose weights lie between the channels of a head.

    .. math::
        A_h = \mathrm{softmax}\big(\tau_h\,\hat q_h^\top \hat k_h\big) \in R^{K \times K}, \quad
        y = W_o\,[v_h A_h^\top]_{h=1..H}, \quad
        \hat q_{tc} = q_{tc} / \max(\lVert q_{:c} \rVert_2, 10^{-12})

    Positions meet in the norms and in the products only: a model needs convolutions beside it.

    Source: XCiT (El-Nouby et al., arXiv 2106.09681).

    Args:
        dims: Dims `D`.
        num_heads: Heads `H`, of `K` dims.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        is_stacked: Queries, keys and values come from one projection, `qkv_proj`, in this order.
        bias: Whether queries, keys and values are projected with a bias; the output always is.

    Shape:
        `x` and `y`: `(B, H, W, D)`; `temperature`: `(H,)`, :math:`\tau`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims, or an input has other
            dims.

    Example:
        >>> CrossCovarianceAttention(32)(mx.zeros((1, 5, 4, 32))).shape
        (1, 5, 4, 32)
    """

    equation: ClassVar[str] = "y = v softmax(t q^T k)^T, q and k of length 1 over the positions"
    complexity: ClassVar[str] = "T D^2 / H"
    paper: ClassVar[str] = "arXiv 2106.09681"

    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 8,
        linear: Linears = Linear,
        is_stacked: bool = False,
        bias: bool = True,
    ):
        super().__init__()
        dims_of_a_head("CrossCovarianceAttention", dims, num_heads)
        self._dims = dims
        self.num_heads = num_heads
        inner = {"qkv_proj": [dims] * 3} if is_stacked else {name: [dims] for name in _PROJECTIONS}
        self.make_projections(dims, inner, linear, bias=bias)
        self.make_output(dims, dims, linear, bias=True)
        self.temperature = mx.ones((num_heads,))

    @property
    def stored_layouts(self) -> dict[str, StoredLayout]:
        return {"temperature": StoredLayout.reshaped((self.num_heads, 1, 1), (self.num_heads,))}

    def mix(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        shape = v.shape
        q, k, v = (
            split_heads(mx.flatten(part, 1, 2).astype(mx.float32), self.num_heads)
            for part in (q, k, v)
        )
        scores = _unit(q).swapaxes(-1, -2) @ _unit(k)
        weights = mx.softmax(self.temperature[:, None, None].astype(mx.float32) * scores, axis=-1)
        return merge_heads(v @ weights.swapaxes(-1, -2)).reshape(shape)


def _unit(x: mx.array) -> mx.array:
    """Channels `(B, H, T, K)` of length 1 over the positions."""
    squares = long_sum(x.square(), axis=-2)[:, :, None]
    # the larger of two squares, since the root of 0 has no gradient
    return x / mx.sqrt(mx.maximum(squares, _EPS**2))
