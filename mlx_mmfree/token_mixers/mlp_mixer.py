"""MLP-Mixer: a perceptron along the sequence (Tolstikhin et al., arXiv 2105.01601)."""

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..layers.arguments import check_optional_sizes, check_sequences, check_sizes
from ..layers.context import Context
from ..layers.linear_factory import Linears, factory_of
from ..layers.padding import RealTokens, read_without_padding
from ..layers.token_mixer import TokenMixer


class MLPMixer(TokenMixer):
    r"""Two projections along the sequence, the same for every channel.

    .. math::
        Y = \big(W_2\,\mathrm{gelu}(W_1 X^\top{}^\top + b_1) + b_2\big), \quad
        W_1 \in R^{S \times T},\ W_2 \in R^{T \times S}

    with the columns of `X` as vectors of `T` tokens and the exact GELU. They are made for a longest
    sequence `T`; a shorter one takes the first columns of :math:`W_1` and the first rows of
    :math:`W_2`. Padding is zero, and stands behind the tokens.

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
        ValueError: A sequence is longer than `max_length`.

    Example:
        >>> MLPMixer(32, max_length=16)(mx.zeros((1, 9, 32)))[0].shape
        (1, 9, 32)
    """

    equation: ClassVar[str] = "Y = W_2 gelu(W_1 X), along the sequence"
    complexity: ClassVar[str] = "2 T S D"
    paper: ClassVar[str] = "arXiv 2105.01601"
    bidirectional: ClassVar[bool] = True
    length_bound: ClassVar[bool] = True

    def __init__(
        self,
        dims: int,
        *,
        max_length: int,
        num_hidden: int | None = None,
        linear: Linears = nn.Linear,
        bias: bool = True,
    ):
        super().__init__()
        check_sizes("MLPMixer", dims=dims, max_length=max_length)
        check_optional_sizes("MLPMixer", num_hidden=num_hidden)
        self._dims = dims
        self._max_length = max_length
        num_hidden = max(1, dims // 2) if num_hidden is None else num_hidden
        make = factory_of(linear, "up_length_proj")
        self.up_length_proj = make(max_length, num_hidden, bias=bias)
        make = factory_of(linear, "down_length_proj")
        self.down_length_proj = make(num_hidden, max_length, bias=bias)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> tuple[()]:
        return ()

    def __call__(
        self,
        x: mx.array,
        state: tuple[()] | None = None,
        valid: mx.array | None = None,
    ) -> tuple[mx.array, tuple[()]]:
        check_sequences("MLPMixer", x, self._dims)
        if x.shape[1] > self._max_length:
            raise ValueError(
                f"[MLPMixer] 'x' must not be longer than 'max_length', {self._max_length}, but has "
                f"{x.shape[1]} positions."
            )
        return read_without_padding(x, Context(valid), self._mix)

    def _mix(self, x: mx.array, tokens: RealTokens) -> tuple[mx.array, tuple[()]]:
        length = x.shape[1]
        columns = mx.pad(x, [(0, 0), (0, self._max_length - length), (0, 0)]).swapaxes(1, 2)
        y = self.down_length_proj(nn.gelu(self.up_length_proj(columns)))
        return y.swapaxes(1, 2)[:, :length].astype(x.dtype), ()
