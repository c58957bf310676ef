"""Hydra attention, with as many heads as dims (Bolya et al., arXiv 2209.07484)."""

from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from ..layers.arguments import check_sequences, check_sizes
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.mixer import QUERIES_KEYS_VALUES, Group, Linears, Partition, TokenMixer
from ..layers.recurrence import check_no_starts, weights_of_kernel
from ..ops import linear_scan, long_sum


class HydraState(NamedTuple):
    """The state of a causal `Hydra`.

    Attributes:
        sums: The sums of all keys times their values, float32 `(B, D)`.

    Example:
        >>> y, state = Hydra(32)(mx.zeros((2, 5, 32)))
        >>> state.sums.shape
        (2, 32)
    """

    sums: mx.array


class Hydra(TokenMixer):
    r"""Linear attention with heads of one dim, so that its state is a vector.

    .. math::
        y_t = W_o\Big(\hat q_t \odot \sum_{j \le t} \hat k_j \odot v_j\Big), \quad
        \hat q = q / \max(\lVert q \rVert_2, \epsilon)

    with the norms over all dims. Not causal, the sum runs over all positions. Nothing divides by the
    number of positions, so that results grow with the length: a norm after it keeps the size of a
    model's values. The published snippet has no epsilon and gives NaN for a zero vector.

    Source: Bolya et al., arXiv 2209.07484.

    Args:
        dims: Model dims `D`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.
        eps: :math:`\epsilon`.
        is_causal: Each token sees the ones before it and itself; otherwise all of the sequence.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `HydraState`; `()` if not causal.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, or an input has other dims.

    Example:
        >>> y, state = Hydra(32)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.sums.shape
        ((1, 5, 32), (1, 32))
    """

    equation: ClassVar[str] = "y_t = q_t / |q_t| * sum_j k_j / |k_j| * v_j"
    complexity: ClassVar[str] = "T D"
    paper: ClassVar[str] = "arXiv 2209.07484"
    causal: ClassVar[bool] = True
    bidirectional: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True
    weighs_channels: ClassVar[bool] = True
    partition = Partition(QUERIES_KEYS_VALUES, counts=("_channels",))

    def __init__(
        self,
        dims: int,
        *,
        linear: Linears = Linear,
        bias: bool = False,
        eps: float = 1e-6,
        is_causal: bool = True,
    ):
        super().__init__()
        check_sizes("Hydra", dims=dims)
        self._dims = dims
        self._channels = dims
        self._group: Group | None = None
        self._eps = eps
        self.is_causal = is_causal
        inner = {name: [dims] for name in ("query_proj", "key_proj", "value_proj")}
        self.make_projections(dims, inner, linear, bias=bias)
        self.make_output(dims, dims, linear, bias=bias)

    def take_part(self, group: Group) -> None:
        self._group = group

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> HydraState | tuple[()]:
        return HydraState(mx.zeros((batch_size, self._channels))) if self.is_causal else ()

    def mix(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        state: HydraState | tuple[()],
        context: Context,
    ) -> tuple[mx.array, HydraState | tuple[()]]:
        valid, starts = context.valid, context.starts
        q, k, v = (part.astype(mx.float32) for part in (q, k, v))
        products = self._unit(k) * v
        if valid is not None:
            products = mx.where(valid[..., None], products, 0.0)
        if isinstance(state, HydraState):
            # a row of gates that all positions share, so that no kernel on a CPU needs a copy of it
            decay = mx.ones((1, 1, self._channels)) if starts is None else 1.0 - starts[..., None]
            sums, last = linear_scan(mx.broadcast_to(decay, products.shape), products, state.sums)
            state = HydraState(last)
        else:
            check_no_starts("Hydra", starts)
            sums = long_sum(products.swapaxes(1, 2), axis=-1)[:, None]
        return self._unit(q) * sums, state

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        check_sequences("Hydra", x, self._dims)
        q, k, _ = (
            self._unit(part.astype(mx.float32)).swapaxes(1, 2)[..., None]
            for part in self.apart(self.project(x))
        )
        return weights_of_kernel(q, k, is_causal=self.is_causal)

    def _unit(self, x: mx.array) -> mx.array:
        """Vectors of length 1, which the processes of a group hold in parts."""
        squares = x.square().sum(axis=-1, keepdims=True)
        if self._group is not None:
            squares = mx.distributed.all_sum(squares, group=self._group)
        return x * mx.rsqrt(mx.maximum(squares, self._eps**2))
