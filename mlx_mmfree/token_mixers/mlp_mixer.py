"""MLP-Mixer: a perceptron along the sequence (Tolstikhin et al., arXiv 2105.01601)."""

from typing import Any, ClassVar

import mlx.core as mx

from ..layers.arguments import check_optional_sizes, check_sequences, check_sizes
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.matrix import matrix_of
from ..layers.mixer import Linears, TokenMixer
from ..ops import activate


class MLPMixer(TokenMixer):
    r"""Two projections along the sequence, the same for every channel.

    .. math::
        Y = \big(W_2\,\mathrm{gelu}(W_1 X^\top{}^\top + b_1) + b_2\big), \quad
        W_1 \in R^{S \times T},\ W_2 \in R^{T \times S}

    with the columns of `X` as vectors of `T` tokens and the exact GELU. They are made for a longest
    sequence `T`; a shorter one takes the first columns of :math:`W_1` and the first rows of
    :math:`W_2`. Padding is zero, and comes after the tokens.

    Source: Tolstikhin et al., arXiv 2105.01601.

    Args:
        dims: Model dims `D`.
        max_length: The longest sequence `T`.
        num_hidden: Width `S` between the projections. Default: half of `dims`, as in the paper; the
            package mlp-mixer-pytorch takes four times `dims`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each. :math:`W_1` and :math:`W_2` are
            `up_length_proj` and `down_length_proj`.
        bias: Whether the projections have a bias.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `()`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size or an input does not fit. A sequence is longer than `max_length`.

    Example:
        >>> MLPMixer(32, max_length=16)(mx.zeros((1, 9, 32)))[0].shape
        (1, 9, 32)
    """

    equation: ClassVar[str] = "Y = W_2 gelu(W_1 X), along the sequence"
    complexity: ClassVar[str] = "2 T S D"
    paper: ClassVar[str] = "arXiv 2105.01601"
    bidirectional: ClassVar[bool] = True
    length_bound: ClassVar[bool] = True
    weighs_channels: ClassVar[bool] = True

    def __init__(
        self,
        dims: int,
        *,
        max_length: int,
        num_hidden: int | None = None,
        linear: Linears = Linear,
        bias: bool = True,
    ):
        super().__init__()
        check_sizes("MLPMixer", dims=dims, max_length=max_length)
        check_optional_sizes("MLPMixer", num_hidden=num_hidden)
        self._dims = dims
        self._max_length = max_length
        num_hidden = max(1, dims // 2) if num_hidden is None else num_hidden
        along = {"up_length_proj": [num_hidden]}
        self.make_projections(max_length, along, linear, bias=bias)
        self.make_output(num_hidden, max_length, linear, bias=bias, name="down_length_proj")

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> tuple[()]:
        return ()

    def checked_state(self, x: mx.array, state: tuple[()] | None) -> tuple[()]:
        self._check(x)
        return ()

    def mix(self, h: mx.array) -> mx.array:
        return activate(h, "gelu")

    def run(
        self, x: mx.array, state: tuple[()], context: Context, **arguments: Any
    ) -> tuple[mx.array, tuple[()]]:
        """Its projections read a channel of all positions, which stand in the last axis for them."""
        length = x.shape[1]
        rows = mx.pad(context.padding_moved(x), [(0, 0), (0, self._max_length - length), (0, 0)])
        h = self.mix(*self.apart(self.project(rows.swapaxes(1, 2))))
        y = self.finish(h, x.dtype).swapaxes(1, 2)[:, :length]
        return context.padding_moved_back(y), ()

    def _check(self, x: mx.array) -> None:
        check_sequences("MLPMixer", x, self._dims)
        if x.shape[1] > self._max_length:
            raise ValueError(
                f"[MLPMixer] 'x' must not be longer than 'max_length', {self._max_length}, but has "
                f"{x.shape[1]} positions."
            )

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        r"""Mixing weights that :math:`\mathrm{gelu}(z) = z\,\Phi(z)` leaves: for each channel a product
        of matrices, :math:`W_2\,\mathrm{diag}(\Phi(z))\,W_1`, `(B, D, L, L)`.
        """
        self._check(x)
        up, down = (matrix_of(self[name]) for name in ("up_length_proj", "down_length_proj"))
        if up is None or down is None or up.is_ternary or down.is_ternary:
            raise ValueError(
                "[MLPMixer] has no weights between positions that could be shown: its projections "
                "norm what they read."
            )
        length = x.shape[1]
        columns = mx.pad(x, [(0, 0), (0, self._max_length - length), (0, 0)]).swapaxes(1, 2)
        z = self.up_length_proj(columns).astype(mx.float32)
        shares = (1.0 + mx.erf(z * 0.5**0.5)) / 2
        first = up.multiply(mx.eye(length, self._max_length))
        last = down.multiply(mx.eye(first.shape[1]))[:, :length]
        return (shares[:, :, None] * last.T) @ first.T
