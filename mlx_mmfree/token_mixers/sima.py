"""SimA, attention without softmax (Koohpayegani and Pirsiavash, arXiv 2206.08898)."""

from collections.abc import Iterable
from typing import Any, ClassVar

import mlx.core as mx

from ..layers.arguments import check_sequences, dims_of_a_head
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.linear import merge_heads, split_heads
from ..layers.mixer import QUERIES_KEYS_VALUES, Linears, Partition, TokenMixer
from ..layers.recurrence import weights_of_kernel
from ..ops import long_sum


class SimA(TokenMixer):
    r"""Products of queries and keys whose channels are normed over the tokens.

    .. math::
        y = W_o\,\hat q\,(\hat k^\top v), \quad
        \hat q_{tc} = q_{tc} \,/\, \max\Big(\sum_j \lvert q_{jc} \rvert, \epsilon\Big)

    for each head; the keys likewise. Weights may be negative, and nothing is scaled. The norm of the
    queries sees all tokens too, so that there is no causal variant. The product in brackets is computed
    first where there are as many tokens as dims of a head, and last otherwise.

    Class attention is its format for the last blocks of an image model: only the first token, which is
    no padding, is changed.

    Source: Koohpayegani and Pirsiavash, arXiv 2206.08898.

    Args:
        dims: Model dims `D`.
        num_heads: Heads `H`.
        class_only: Class attention: the first token sees all, the others stay as they are.
        eps: :math:`\epsilon`. Default: 1e-12, or 1e-6 for class attention, as in the released code.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `()`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims, or an input has other
            dims.

    Example:
        >>> y, state = SimA(32, num_heads=4)(mx.zeros((1, 5, 32)))
        >>> y.shape, state
        ((1, 5, 32), ())
    """

    equation: ClassVar[str] = "y = q (k^T v), q and k divided by their L1 norms over the tokens"
    complexity: ClassVar[str] = "T D min(T, D / H)"
    paper: ClassVar[str] = "arXiv 2206.08898"
    bidirectional: ClassVar[bool] = True
    partition = Partition(QUERIES_KEYS_VALUES)

    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 8,
        class_only: bool = False,
        eps: float | None = None,
        linear: Linears = Linear,
        bias: bool = False,
    ):
        super().__init__()
        self._head_dim = dims_of_a_head("SimA", dims, num_heads)
        self._dims = dims
        self.num_heads = num_heads
        self._class_only = class_only
        default = 1e-6 if class_only else 1e-12
        self._eps = default if eps is None else eps
        inner = {name: [dims] for name in ("query_proj", "key_proj", "value_proj")}
        self.make_projections(dims, inner, linear, bias=bias)
        self.make_output(dims, dims, linear, bias=bias)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> tuple[()]:
        return ()

    def mix(
        self, q: mx.array, k: mx.array, v: mx.array, state: tuple[()], context: Context
    ) -> tuple[mx.array, tuple[()]]:
        q, k, v = self._heads((q, k, v), context.valid)
        if self._class_only:
            q = mx.take_along_axis(q, _first(q, context)[:, None, None, None], axis=2)
        if k.shape[2] < self._head_dim or self._class_only:
            o = (q @ k.swapaxes(-1, -2)) @ v
        else:
            o = q @ (k.swapaxes(-1, -2) @ v)
        return merge_heads(o), ()

    def is_cut(self, x: mx.array, state: tuple[()], context: Context) -> bool:
        return super().is_cut(x, state, context) and not self._class_only

    def run(
        self, x: mx.array, state: tuple[()], context: Context, **arguments: Any
    ) -> tuple[mx.array, tuple[()]]:
        y, state = super().run(x, state, context, **arguments)
        if self._class_only:
            # the others stay as they are
            is_first = mx.arange(x.shape[1]) == _first(x, context)[:, None]
            y = mx.where(is_first[..., None], y, x)
        return y, state

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        check_sequences("SimA", x, self._dims)
        q, k, _ = self._heads(self.apart(self.project(x)), None)
        weights = weights_of_kernel(q, k, is_causal=False)
        if self._class_only:
            weights = mx.where((mx.arange(x.shape[1]) == 0)[:, None], weights, 0.0)
        return weights

    def _heads(self, parts: Iterable[mx.array], valid: mx.array | None) -> tuple[mx.array, ...]:
        """Normed queries and keys, and values, float32 `(B, H, L, K)`, zero where padded."""
        heads = []
        for part in parts:
            part = part.astype(mx.float32)
            part = part if valid is None else mx.where(valid[..., None], part, 0.0)
            heads.append(split_heads(part, self.num_heads))
        q, k, v = heads
        return self._normed(q), self._normed(k), v

    def _normed(self, x: mx.array) -> mx.array:
        """Heads `(B, H, L, K)` divided by the sums of their absolute values over the tokens."""
        sums = long_sum(mx.abs(x).swapaxes(-1, -2), axis=-1)[:, :, None]
        return x / mx.maximum(sums, self._eps)


def _first(x: mx.array, context: Context) -> mx.array:
    """The first token of each row, integers `(B,)`."""
    valid = context.valid
    return mx.zeros((x.shape[0],), mx.int32) if valid is None else mx.argmax(valid, axis=1)
