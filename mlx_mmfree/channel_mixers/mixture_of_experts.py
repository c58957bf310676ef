"""A sparsely gated mixture of feed-forwards (Shazeer et al., arXiv 1701.06538)."""

import mlx.core as mx

from ..layers import ChannelMixer
from ..layers.arguments import check_features, check_sizes
from ..layers.dense import Linear
from ..layers.linear import Float32Linear, gathered_product
from ..layers.matrix import StoredLayout
from ..layers.mixer import Linears, factory_of
from ..ops import gated_activation
from ..ops.device import runs_metal_kernels

_MANY_ROWS = 64
"""From so many rows on, they are sorted on a GPU."""


class MixtureOfExperts(ChannelMixer):
    r"""SwiGLU feed-forwards, of which a router chooses a few for each position.

    .. math::
        p &= \mathrm{softmax}(W_r\,x), \quad S = \text{the } k \text{ largest of } p, \quad
        w_e = \frac{p_e}{\sum_{i \in S} p_i} \\
        y &= \sum_{e \in S} w_e\,W_{\mathrm{down},e}\big(\mathrm{silu}(\min(W_{\mathrm{gate},e}\,x, c))
        \odot \mathrm{clip}(W_{\mathrm{up},e}\,x, -c, c)\big)

    The router computes in float32, and so does the sum. The matrices of all experts lie one after the
    other in one linear, of which only those that some position chooses are read.

    Source: Shazeer et al., arXiv 1701.06538, with the softmax before the choice (Switch Transformers,
    Fedus et al., arXiv 2101.03961).

    Args:
        dims: Model dims `D`.
        hidden_dims: Width of an expert.
        num_experts: Experts `E`.
        num_chosen: Experts `k` that a position is given.
        limit: The bound `c`; `None`: there is none.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.

    Parameters:
        `router`, and `gate_proj`, `up_proj` and `down_proj` with the rows of all experts.

    Shape:
        `x` and `y`: `(..., D)`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, more experts are chosen than there are, or an input has other
            dims.

    Example:
        >>> mixer = MixtureOfExperts(32, hidden_dims=16, num_experts=4, num_chosen=2)
        >>> mixer(mx.ones((1, 3, 32))).shape
        (1, 3, 32)
    """

    name = "mixture_of_experts"

    def __init__(
        self,
        dims: int,
        *,
        hidden_dims: int,
        num_experts: int = 8,
        num_chosen: int = 2,
        limit: float | None = None,
        linear: Linears = Linear,
    ):
        super().__init__()
        sizes = {"dims": dims, "hidden_dims": hidden_dims}
        check_sizes("MixtureOfExperts", **sizes, num_experts=num_experts, num_chosen=num_chosen)
        if num_chosen > num_experts:
            raise ValueError(
                "[MixtureOfExperts] 'num_chosen' must be at most 'num_experts' but got "
                f"{num_chosen} of {num_experts}."
            )
        self.num_experts, self.num_chosen, self.limit = num_experts, num_chosen, limit
        self._dims, self._hidden_dims = dims, hidden_dims
        self.router = Float32Linear(dims, num_experts, bias=False)
        for name, (inputs, outputs) in self._sizes.items():
            self[name] = factory_of(linear, name)(inputs, num_experts * outputs, bias=False)

    @property
    def _sizes(self) -> dict[str, tuple[int, int]]:
        """The inputs and outputs of a projection of one expert, by its name."""
        inner = self._dims, self._hidden_dims
        return {"gate_proj": inner, "up_proj": inner, "down_proj": inner[::-1]}

    @property
    def stored_layouts(self) -> dict[str, StoredLayout]:
        """On disk, experts have an axis of their own."""
        return {
            f"{name}.weight": StoredLayout.reshaped(
                (self.num_experts, outputs, inputs), (self.num_experts * outputs, inputs)
            )
            for name, (inputs, outputs) in self._sizes.items()
        }

    @property
    def widths(self) -> list[int]:
        """How many numbers each projection takes and gives for a position: the chosen experts' alone."""
        sizes = [self.num_chosen * sum(sizes) for sizes in self._sizes.values()]
        return [self._dims + self.num_experts, *sizes]

    def choose(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """The experts of each position, `uint32 (..., k)`, and their weights, float32 `(..., k)`."""
        shares = mx.softmax(self.router(x), axis=-1)
        order = mx.argpartition(-mx.stop_gradient(shares), self.num_chosen - 1, axis=-1)
        chosen = order[..., : self.num_chosen]
        weights = mx.take_along_axis(shares, chosen, axis=-1)
        return chosen, weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)

    def mix(self, x: mx.array) -> mx.array:
        check_features("MixtureOfExperts", x, self._dims)
        if x.size == 0:
            return x
        chosen, weights = self.choose(x)
        if chosen.size >= _MANY_ROWS and runs_metal_kernels():
            y = self._sorted(x, chosen)
        else:
            rows = mx.broadcast_to(x[..., None, :], (*chosen.shape, self._dims))
            y = self._experts(rows, chosen, None)
        return (y * weights[..., None]).sum(axis=-2).astype(x.dtype)

    def _sorted(self, x: mx.array, chosen: mx.array) -> mx.array:
        """The results of the chosen experts, for rows that are sorted by them, `(..., k, D)`."""
        order = mx.argsort(chosen.flatten())
        indices = chosen.flatten()[order]
        experts = mx.arange(self.num_experts + 1, dtype=indices.dtype)
        starts = (indices < experts[:, None]).sum(axis=-1)
        rows = x.reshape(-1, self._dims)[order // self.num_chosen]
        y = self._experts(rows, indices, starts)[mx.argsort(order)]
        return y.reshape(*chosen.shape, self._dims)

    def _experts(self, rows: mx.array, chosen: mx.array, starts: mx.array | None) -> mx.array:
        """The result of each row's expert, float32."""
        count = self.num_experts
        gate = gathered_product(self.gate_proj, rows, chosen, count, starts)
        up = gathered_product(self.up_proj, rows, chosen, count, starts)
        if self.limit is not None:
            gate, up = mx.minimum(gate, self.limit), mx.clip(up, -self.limit, self.limit)
        hidden = gated_activation(gate, up, "silu").astype(rows.dtype)
        return gathered_product(self.down_proj, hidden, chosen, count, starts)
