"""A sequence cut into blocks, so that attention to what is near costs the same at any length."""

import mlx.core as mx

from .key_value_reading import first_seen
from .positions import sample_begins

SMALLEST = 64
"""Tokens of a block at least; smaller products would take longer for each token."""


class SequenceBlocks:
    """Blocks of one size, each beside the one before and the one behind if there are several.

    Blocks become rows of a batch: where a row is cut into `n` blocks, row `b`, block `i` is row
    `b n + i`.

    Args:
        length: Number of tokens `L`.
        size: Tokens `S` of a block. The last one is filled up.
    """

    def __init__(self, length: int, size: int):
        self.length = length
        self.size = size
        self.count = -(-length // size)
        self._beside = int(self.count > 1)

    @classmethod
    def of_window(cls, length: int, window: int) -> "SequenceBlocks":
        """Those beyond whose neighbours no token sees that sees what is nearer than the window."""
        return cls(length, min(max(window, SMALLEST), length))

    @property
    def span(self) -> int:
        """Tokens `N` of a block and those beside it."""
        return (1 + 2 * self._beside) * self.size

    def own(self, x: mx.array, fill: int = 0) -> mx.array:
        """Each block of `(B, H, L, K)`, as `(B n, H, S, K)`."""
        return mx.flatten(self._cut(self._padded(x, 0, fill)).swapaxes(1, 2), 0, 1)

    def near(self, x: mx.array, fill: int = 0) -> mx.array:
        """Each block of `(B, H, L, K)` between those beside it, as `(B n, H, N, K)`."""
        x, whole = self._padded(x, self._beside, fill), self.count * self.size
        starts = range(0, self.span, self.size)
        blocks = [self._cut(x[:, :, start : start + whole]) for start in starts]
        return mx.flatten(mx.concatenate(blocks, axis=3).swapaxes(1, 2), 0, 1)

    def _padded(self, x: mx.array, more: int, fill: int) -> mx.array:
        """Filled up to whole blocks, with some blocks more before and behind."""
        missing = self.count * self.size - self.length
        if not missing and not more:
            return x
        widths = [(0, 0), (0, 0), (more * self.size, missing + more * self.size), (0, 0)]
        return mx.pad(x, widths, constant_values=fill)

    def _cut(self, x: mx.array) -> mx.array:
        return mx.unflatten(x, 2, (self.count, self.size))

    def joined(self, y: mx.array) -> mx.array:
        """`(B n, H, S, V)` as the sequence `(B, H, L, V)`."""
        blocks = mx.unflatten(y, 0, (-1, self.count)).swapaxes(1, 2)
        return mx.flatten(blocks, 2, 3)[:, :, : self.length]

    def every_row(self, x: mx.array, batch: int) -> mx.array:
        """What is made for one row, `(n, ...)`, for each of a batch, `(B n, ...)`."""
        return x if x.shape[0] != self.count or batch == 1 else mx.concatenate([x] * batch)

    def for_each(self, x: mx.array) -> mx.array:
        """What every block of a row is given, `(B, ...)`, as `(B n, ...)`."""
        shape = (x.shape[0], self.count, *x.shape[1:])
        return mx.flatten(mx.broadcast_to(x[:, None], shape), 0, 1)

    @property
    def relative(self) -> mx.array:
        """The position of each key less that of the query, `(1, S, N)`."""
        key = mx.arange(self.span) - self._beside * self.size
        return key[None, None] - mx.arange(self.size)[:, None]


def near_mask(
    blocks: SequenceBlocks,
    counts: mx.array | None,
    starts: mx.array | None,
    window: int,
    step: int,
) -> mx.array:
    """Which tokens of its block and the ones beside each token sees on both sides.

    Args:
        blocks: Those of the sequence, as large as the window at least.
        counts: How many tokens of each row are real, `(B,)`; they come first. `None`: all.
        starts: Booleans `(B, L)`, `True` where another sample begins in the row.
        window: A token sees those nearer than this.
        step: Number of tokens by which the window moves on at a time.

    Returns:
        Booleans `(n, 1, S, N)`, or `(B n, 1, S, N)` where rows differ. Padding sees padding, so
        that no row is empty.
    """
    token = mx.arange(blocks.length)[None]
    begin = mx.zeros_like(token) if starts is None else sample_begins(starts)
    if counts is not None:
        begin = mx.where(token < counts[:, None], begin, -1)
    begin = mx.broadcast_to(begin, (begin.shape[0], blocks.length))
    place = mx.broadcast_to(token - begin, begin.shape)

    def column(x: mx.array) -> mx.array:
        return x[:, None, :, None]

    near_begin = blocks.near(column(begin), -1).swapaxes(2, 3)
    is_same = blocks.own(column(begin), -1) == near_begin
    # filled up, places go on as those of the padding that they stand beside
    query = blocks.own(column(place))
    key = query + blocks.relative
    low = first_seen(query, window, step)
    high = query // step * step + window
    is_near = mx.logical_and(key >= low, key < high)
    return mx.logical_and(is_same, is_near)
