"""Pooling along the sequence (MetaFormer, Yu et al., arXiv 2111.11418)."""

from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from ..layers.arguments import check_optional_sizes, check_sequences, check_sizes
from ..layers.context import Context, count_on
from ..layers.dense import Linear
from ..layers.mixer import Linears, TokenMixer
from ..ops import linear_scan


class PoolingState(NamedTuple):
    """The state of a causal `Pooling`.

    Attributes:
        read: Tokens of each row that were read, integers `(B,)`.
        recent: The last tokens, float32 `(B, W - 1, D)`, first to last, zero where there were fewer;
            without a window the mean of all, `(B, 1, D)`.

    Example:
        >>> y, state = Pooling(32)(mx.zeros((2, 5, 32)))
        >>> state.recent.shape
        (2, 1, 32)
    """

    read: mx.array
    recent: mx.array


class Pooling(TokenMixer):
    r"""The mean of the tokens around, less the token itself, without parameters.

    .. math::
        y_t = \frac{1}{|N(t)|} \sum_{j \in N(t)} x_j - x_t

    where :math:`N(t)` is the `W` tokens in whose middle `t` stands or, if it is causal, the last `W`;
    beyond the ends of the sequence none are counted. Without a window it is the whole sequence, or all
    tokens before and `t`. PoolFormer has `window=3`, in both directions of an image.

    Source: MetaFormer (Yu et al., arXiv 2111.11418).

    Args:
        dims: Model dims `D`.
        window: Tokens `W`, an odd number if it is not causal; `None`: all.
        linear: As other mixers take it; there is no projection.
        is_causal: Later tokens do not count.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `PoolingState`; `()` if not causal.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size or an input does not fit. The window has no middle.

    Example:
        >>> Pooling(1, window=3, is_causal=False)(mx.array([[[1.0], [2.0], [6.0]]]))[0].tolist()
        [[[0.5], [1.0], [-2.0]]]
    """

    equation: ClassVar[str] = "y_t = mean of the x_j around t - x_t"
    complexity: ClassVar[str] = "T W D, or T D without a window"
    paper: ClassVar[str] = "arXiv 2111.11418"
    causal: ClassVar[bool] = True
    bidirectional: ClassVar[bool] = True
    padding_last: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True

    def __init__(
        self,
        dims: int,
        *,
        window: int | None = None,
        linear: Linears = Linear,
        is_causal: bool = True,
    ):
        super().__init__()
        check_sizes("Pooling", dims=dims)
        check_optional_sizes("Pooling", window=window)
        if window is not None and not is_causal and window % 2 == 0:
            raise ValueError(
                f"[Pooling] 'window' must be odd unless 'is_causal' is set but got {window}."
            )
        self._dims = dims
        self._window = window
        self.is_causal = is_causal

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> PoolingState | tuple[()]:
        return self._first(batch_size, self._dims) if self.is_causal else ()

    def _first(self, batch_size: int, dims: int) -> PoolingState:
        size = 1 if self._window is None else self._window - 1
        recent = mx.zeros((batch_size, size, dims))
        return PoolingState(mx.zeros((batch_size,), mx.int32), recent)

    def mix(
        self, x: mx.array, state: PoolingState | tuple[()], context: Context
    ) -> tuple[mx.array, PoolingState | tuple[()]]:
        before = state if isinstance(state, PoolingState) else self._first(x.shape[0], self._dims)
        mean, after = self._mean(x.astype(mx.float32), before, context)
        return mean.astype(x.dtype) - x, after if self.is_causal else ()

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        check_sequences("Pooling", x, self._dims)
        batch, length, _ = x.shape
        one_hot = mx.broadcast_to(mx.eye(length), (batch, length, length))
        mean, _ = self._mean(one_hot, self._first(batch, length), Context())
        return mean[:, None] - mx.eye(length)

    def _mean(
        self, x: mx.array, before: PoolingState, context: Context
    ) -> tuple[mx.array, PoolingState]:
        """The mean around each token, float32 `(B, L, D)`, of rows whose padding comes last."""
        counts, starts = context.counts, context.starts
        length = x.shape[1]
        valid = None if counts is None else mx.arange(length) < counts[:, None]
        position, count = count_on(before.read, length, Context(valid, starts=starts))
        if self._window is None:
            keep = mx.broadcast_to((position / (position + 1))[..., None], x.shape)
            if valid is not None:
                keep = mx.where(valid[..., None], keep, 1.0)
            means, last = linear_scan(keep, x * (1.0 - keep), before.recent[:, 0])
            if not self.is_causal:
                means = mx.take_along_axis(means, self._ends(position, counts)[..., None], axis=1)
            return means, PoolingState(count, last[:, None])
        if self.is_causal:
            return self._mean_of_last(x, before, position, count, counts)
        reach = self._window // 2
        ends = self._ends(position, counts)
        around = mx.pad(x, [(0, 0), (reach, reach), (0, 0)])
        token = mx.arange(length)
        total = mx.zeros_like(x)
        for step in range(-reach, reach + 1):
            is_in = mx.logical_and(position + step >= 0, token + step <= ends)
            near = around[:, reach + step : reach + step + length]
            total = total + mx.where(is_in[..., None], near, 0.0)
        number = mx.minimum(position, reach) + mx.minimum(ends - token, reach) + 1
        return total / mx.maximum(number, 1)[..., None], before

    def _mean_of_last(
        self,
        x: mx.array,
        before: PoolingState,
        position: mx.array,
        count: mx.array,
        counts: mx.array | None,
    ) -> tuple[mx.array, PoolingState]:
        length, size = x.shape[1], before.recent.shape[1]
        rows = mx.concatenate([before.recent, x], axis=1)
        total = x
        for step in range(1, size + 1):
            earlier = rows[:, size - step : size - step + length]
            total = total + mx.where((position >= step)[..., None], earlier, 0.0)
        mean = total / mx.minimum(position + 1, size + 1)[..., None]
        ends = length if counts is None else counts[:, None, None]
        chosen = mx.broadcast_to(mx.arange(size)[:, None] + ends, (x.shape[0], size, 1))
        recent = mx.take_along_axis(rows, chosen, axis=1)
        is_own = mx.arange(size) >= size - count[:, None]
        return mean, PoolingState(count, mx.where(is_own[..., None], recent, 0.0))

    def _ends(self, position: mx.array, counts: mx.array | None) -> mx.array:
        """The last token of each one's sample, `(B, L)`."""
        length = position.shape[1]
        token = mx.arange(length)
        last = length - 1 if counts is None else mx.maximum(counts[:, None] - 1, 0)
        # the next sample begins where the position is 0 again
        begins = mx.where(position[:, 1:] == 0, token[:-1], length - 1)
        following = mx.pad(begins, [(0, 0), (0, 1)], constant_values=length - 1)
        return mx.minimum(mx.cummin(following, axis=1, reverse=True), last)
