"""Positions that are added to the residual stream before the first block."""

from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .arguments import check_sequences
from .context import Context
from .positions import count_on
from .token_mixer import TokenMixer


class AddedPositionsState(NamedTuple):
    """What `AddedPositions` carries: how many tokens of each row were read, int32 `(B,)`."""

    read: mx.array


class AddedPositions(TokenMixer):
    r"""Adds a code of its position to each token, :math:`y_t = P_{p(t)}`.

    It follows the interface of token mixers, since it too needs to know what was read before. Padding
    counts for no position, and a sample that begins in a row begins at position 0.

    Args:
        dims: Model dims `D`.
        code: Maps positions, integers `(B, L)`, to `(B, L, D)`.
        scale: What the residual stream is multiplied by before.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `AddedPositionsState`.
    """

    causal: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True

    def __init__(self, dims: int, code: nn.Module, *, scale: float = 1.0):
        super().__init__()
        self._dims = dims
        self._scale = scale
        self.code = code

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> AddedPositionsState:
        return AddedPositionsState(mx.zeros((batch_size,), mx.int32))

    def __call__(
        self,
        x: mx.array,
        state: AddedPositionsState | None = None,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
    ) -> tuple[mx.array, AddedPositionsState]:
        return self._codes(x, state, Context(valid, starts=starts))

    def residual(
        self,
        x: mx.array,
        norm: nn.Module | None,
        state: AddedPositionsState | None,
        context: Context,
        **arguments: Any,
    ) -> tuple[mx.array, AddedPositionsState]:
        codes, state = self._codes(x, state, context)
        return (x if self._scale == 1 else x * self._scale) + codes, state

    def _codes(
        self, x: mx.array, state: AddedPositionsState | None, context: Context
    ) -> tuple[mx.array, AddedPositionsState]:
        check_sequences("AddedPositions", x, self._dims)
        state = self.init_state(x.shape[0], x.dtype) if state is None else state
        places, read = count_on(state.read, x.shape[1], context)
        return self.code(places).astype(x.dtype), AddedPositionsState(read)
