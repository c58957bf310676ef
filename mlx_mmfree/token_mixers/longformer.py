"""Longformer: a window on both sides, and tokens that see all (Beltagy et al., arXiv 2004.05150)."""

from typing import Any, ClassVar, cast

import mlx.core as mx

from ..layers.arguments import check_counts, check_sequences, check_sizes, dims_of_a_head
from ..layers.attention.key_values import SequenceBlocks, near_mask
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.linear import merge_heads, one_hot_values, split_heads
from ..layers.mixer import QUERIES_KEYS_VALUES, Linears, Partition, TokenMixer, factory_of
from ..ops import attention

_PROJECTIONS = ("query_proj", "key_proj", "value_proj")


class Longformer(TokenMixer):
    r"""Softmax attention to what is near, with global tokens that see all and are seen by all.

    .. math::
        o_t = \begin{cases}
        \sum_{j} \mathrm{softmax}_j\big(\hat q_t^\top \hat k_j / \sqrt{K}\big)\,\hat v_j
        & t \text{ global} \\
        \sum_{j \in N(t)} \mathrm{softmax}_j\big(q_t^\top k_j / \sqrt{K}\big)\,v_j & \text{else}
        \end{cases}
        \quad N(t) = \{j : |t - j| < W \text{ or } j \text{ global}\}

    for each head, and :math:`y_t = W_o o_t`. Global tokens ask with projections of their own,
    :math:`\hat q, \hat k, \hat v`, at every token; the others see them by the ordinary ones, in one
    softmax with the window, a global token in it only once. `attention_window` of a published
    configuration is :math:`2(W - 1)`. Padding stands nowhere: the window spans real tokens.

    Source: Beltagy et al., arXiv 2004.05150.

    Args:
        dims: Model dims `D`.
        window: Tokens `W` that are seen on each side, each time with the token itself.
        num_global: The first tokens of each sequence that are global where a call does not say which.
        num_heads: Heads `H`.
        head_dim: Dims `K` of a head. Default: `dims / num_heads`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.

    Shape:
        `x` and `y`: `(B, L, D)`; `is_global`: booleans `(B, L)`. How many are true is read from it, so
        that a compiled call leaves it out.

    State:
        `()`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims, or an input has other
            dims.

    Example:
        >>> mixer = Longformer(32, window=4)
        >>> mixer(mx.zeros((1, 9, 32)), is_global=mx.array([[True] + [False] * 8]))[0].shape
        (1, 9, 32)
    """

    equation: ClassVar[str] = "y = softmax(Q K^T / sqrt(d)) V, over the near and the global keys"
    complexity: ClassVar[str] = "T (W + G) D"
    paper: ClassVar[str] = "arXiv 2004.05150"
    bidirectional: ClassVar[bool] = True
    padding_last: ClassVar[bool] = True
    partition = Partition(
        {**QUERIES_KEYS_VALUES, **{f"global_{name}": 1 for name in QUERIES_KEYS_VALUES}}
    )

    def __init__(
        self,
        dims: int,
        *,
        window: int = 256,
        num_global: int = 1,
        num_heads: int = 8,
        head_dim: int | None = None,
        linear: Linears = Linear,
        bias: bool = False,
    ):
        super().__init__()
        check_sizes("Longformer", window=window)
        check_counts("Longformer", num_global=num_global)
        head_dim = dims_of_a_head("Longformer", dims, num_heads, head_dim)
        self._dims = dims
        self.num_heads = num_heads
        self._window = window
        self._num_global = num_global
        for name in (*_PROJECTIONS, *(f"global_{name}" for name in _PROJECTIONS)):
            self[name] = factory_of(linear, name)(dims, num_heads * head_dim, bias=bias)
        self.make_output(num_heads * head_dim, dims, linear, bias=bias)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> tuple[()]:
        return ()

    def mix(
        self, x: mx.array, state: tuple[()], context: Context, *, is_global: mx.array | None = None
    ) -> tuple[mx.array, tuple[()]]:
        return merge_heads(self._attend(x, context.counts, is_global)), ()

    def run(
        self,
        x: mx.array,
        state: tuple[()],
        context: Context,
        *,
        is_global: mx.array | None = None,
        **arguments: Any,
    ) -> tuple[mx.array, tuple[()]]:
        if is_global is not None:
            if is_global.shape != x.shape[:2]:
                raise ValueError(
                    f"[Longformer] 'is_global' must have shape {x.shape[:2]} but got "
                    f"{is_global.shape}."
                )
            arguments["is_global"] = context.padding_moved(is_global)
        return super().run(x, state, context, **arguments)

    def mixing_weights(
        self, x: mx.array, *, is_global: mx.array | None = None, **arguments: Any
    ) -> mx.array:
        check_sequences("Longformer", x, self._dims)
        values = one_hot_values(x.shape[0], self.num_heads, x.shape[1])
        return self._attend(x.astype(mx.float32), None, is_global, values)

    def _attend(
        self,
        x: mx.array,
        counts: mx.array | None,
        is_global: mx.array | None,
        values: mx.array | None = None,
    ) -> mx.array:
        """Attention of rows whose padding comes last, `(B, H, L, V)`.

        `values`, `(B, H, L, V)`, replace the values of `x`.
        """
        batch, length, _ = x.shape
        token = mx.arange(length)[None]
        if is_global is None:
            count = min(self._num_global, length)
            is_global = mx.broadcast_to(token < count, (batch, length))
            if counts is not None:
                is_global = mx.logical_and(is_global, token < counts[:, None])
        else:
            numbers = cast("list[int]", is_global.sum(axis=1).tolist())
            count = max(numbers, default=0)
        # the global tokens of each row, and after them some others where a row has fewer
        positions = mx.argsort(mx.where(is_global, token - length, token), axis=1)[:, :count]
        marked = mx.take_along_axis(is_global, positions, axis=1)
        y = self._local(x, counts, is_global, positions, marked, values)
        if count:
            positions = positions[:, None, :, None]
            own = mx.where(
                marked[:, None, :, None],
                self._global(x, counts, positions[:, 0, :, 0], values),
                mx.take_along_axis(y, positions, axis=2),
            )
            y = mx.put_along_axis(y, mx.broadcast_to(positions, own.shape), own, axis=2)
        return y

    def _local(
        self,
        x: mx.array,
        counts: mx.array | None,
        is_global: mx.array,
        positions: mx.array,
        marked: mx.array,
        values: mx.array | None,
    ) -> mx.array:
        """The result of each token's window and of the global tokens, `(B, H, L, V)`."""
        batch, length, _ = x.shape
        blocks = SequenceBlocks.of_window(length, self._window)
        queries, keys, own_values = (
            split_heads(self[name](x), self.num_heads) for name in _PROJECTIONS
        )
        values = own_values if values is None else values
        seen = blocks.every_row(near_mask(blocks, counts, None, self._window, 1), batch)
        others = blocks.near(mx.logical_not(is_global)[:, None, :, None]).swapaxes(2, 3)
        seen = mx.logical_and(seen, others)
        if positions.shape[1]:
            # every block sees the global tokens after its own
            shape = (*seen.shape[:3], positions.shape[1])
            of_all = mx.broadcast_to(blocks.for_each(marked[:, None, None]), shape)
            seen = mx.concatenate([seen, of_all], axis=-1)
        index = positions[:, None, :, None]
        keys, values = (
            mx.concatenate(
                [blocks.near(part), blocks.for_each(mx.take_along_axis(part, index, axis=2))],
                axis=2,
            )
            for part in (keys, values)
        )
        return blocks.merged(attention(blocks.own(queries), keys, values, seen))

    def _global(
        self, x: mx.array, counts: mx.array | None, positions: mx.array, values: mx.array | None
    ) -> mx.array:
        """The result of the tokens at some positions, which see all, `(B, H, G, V)`."""
        asking = mx.take_along_axis(x, positions[..., None], axis=1)
        queries, keys, own_values = (
            split_heads(self[f"global_{name}"](source), self.num_heads)
            for name, source in zip(_PROJECTIONS, (asking, x, x), strict=True)
        )
        seen = None
        if counts is not None:
            # a row of padding alone sees its first position
            seen = mx.arange(x.shape[1]) < mx.maximum(counts, 1)[:, None, None, None]
        return attention(queries, keys, own_values if values is None else values, seen)
