"""Mixers that read whole rows, and cache keys and values of the tokens before if they are causal."""

from typing import ClassVar, NamedTuple

import mlx.core as mx

from .arguments import check_sequences
from .attention.key_values import KeyValueKind, KeyValueState, extend, read, read_whole
from .attention.options import KeyValueCache
from .context import Context
from .mixer import StateKind, TokenMixer

CachedTokens = KeyValueState | tuple[()]


class KeyValueMixer(TokenMixer):
    """A mixer that sees the tokens before only by the keys and values that it caches of them.

    A mixer of this family sets `_dims`, `is_causal` and, if it is bound to a length, `_max_length`. It
    gives their sizes in `cached_dims`.

    Attributes:
        is_exact: As `KeyValueKind` has it.
    """

    padding_last: ClassVar[bool] = True
    is_exact: ClassVar[bool] = True

    _dims: int
    _max_length: int

    @property
    def cached_dims(self) -> tuple[int, int, int]:
        """Heads, dims of a key, which may be 0, and dims of a value."""
        raise NotImplementedError

    @property
    def state_kind(self) -> StateKind:
        if not self.is_causal:
            return super().state_kind
        heads, key_dims, value_dims = self.cached_dims
        cache = KeyValueCache()
        return KeyValueKind(
            heads,
            key_dims,
            cache,
            takes_steps=False,
            value_dims=value_dims,
            is_exact=self.is_exact,
        )

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> CachedTokens:
        return self.state_kind.blank(batch_size, 0, dtype) if self.is_causal else ()

    def checked_state(self, x: mx.array, state: CachedTokens | None) -> CachedTokens:
        self.check_tokens(x, () if state is None else state)
        return self.init_state(x.shape[0], x.dtype) if state is None else state

    def check_tokens(self, x: mx.array, before: CachedTokens = ()) -> None:
        """Refuses what it cannot read after the tokens before, with `TypeError` or `ValueError`."""
        name = type(self).__name__
        check_sequences(name, x, self._dims)
        used = before.used if isinstance(before, KeyValueState) else 0
        if self.length_bound and used + x.shape[1] > self._max_length:
            raise ValueError(
                f"[{name}] 'x' and what was read before must not be longer than 'max_length', "
                f"{self._max_length}, but have {used + x.shape[1]} positions."
            )


class TokenPositions(NamedTuple):
    """Where the tokens of a call, and those that they see, stand in their samples.

    Attributes:
        length: Number of tokens `L` of the call.
        rows: The position of each, `(B, L)` or `(1, L)`; `None`: from 0 on.
        columns: The position of each token that is seen, from the view of each, `(B, L, N)` or
            `(B, 1, N)`; `None`: from 0 on.
        seen: What each sees, booleans that fit `(B, 1, L, N)`; `None`: all.
    """

    length: int
    rows: mx.array | None
    columns: mx.array | None
    seen: mx.array | None

    def weights(self, table: mx.array) -> mx.array:
        """The weights of a table for all pairs of positions, `(H, M, M)`, as `(B or 1, H, L, N)`."""
        return self.columns_of(self.rows_of(table))

    def rows_of(self, table: mx.array) -> mx.array:
        """The rows of the tokens of a call, `(B or 1, H, L, M)`, of `(H, M, M)`."""
        if self.rows is None:
            return table[None, :, : self.length]
        return mx.take(table, mx.minimum(self.rows, table.shape[1] - 1), axis=1).swapaxes(0, 1)

    def columns_of(self, rows: mx.array) -> mx.array:
        """The entries of rows `(B or 1, H, L, M)` for the tokens that are seen, `(B or 1, H, L, N)`."""
        if self.columns is None:
            return rows[..., : self.length]
        columns = mx.clip(self.columns, 0, rows.shape[-1] - 1)[:, None]
        batch = max(rows.shape[0], columns.shape[0])
        shape = (batch, *rows.shape[1:3])
        rows = mx.broadcast_to(rows, (*shape, rows.shape[-1]))
        columns = mx.broadcast_to(columns, (*shape, columns.shape[-1]))
        return mx.take_along_axis(rows, columns, axis=-1)


def read_with_positions(
    keys: mx.array, values: mx.array, state: CachedTokens, context: Context
) -> tuple[mx.array, mx.array, TokenPositions, CachedTokens]:
    """Adds the tokens of a call to a state's tokens, and returns the positions of all.

    Args:
        keys: `(B, G, L, K)`.
        values: `(B, G, L, V)`.
        state: The tokens before, if the mixer is causal; `()`: every token sees the whole sample.
        context: The call, whose padding stands after its tokens.

    Returns:
        The keys and values that are seen, `(B, G, N, K)` and `(B, G, N, V)`, the positions and the
        state.
    """
    length, counts, starts = values.shape[2], context.counts, context.starts
    if not isinstance(state, KeyValueState):
        positions = context.memoised(
            ("positions of all", length), lambda: _positions_of_all(length, counts, starts)
        )
        return keys, values, positions, state
    which, before = (state.used, length, None, 0, 1), state.positions
    reading = context.memoised(("reading", *which), lambda: read(before, length, counts, starts))
    keys, values, after = extend(state, keys, values, reading)
    seen = reading.mask
    if reading.seen is None and reading.begins is None:
        token = mx.arange(length)
        mask = token <= token[:, None] if isinstance(seen, str) else seen
        return keys, values, TokenPositions(length, None, None, mask), after
    rows = reading.token_positions
    columns = (mx.arange(length)[None] if reading.seen is None else reading.seen)[:, None]
    if reading.begins is not None:
        rows = rows - reading.begins
        columns = columns - reading.begins[..., None]
    assert not isinstance(seen, str)
    return keys, values, TokenPositions(length, rows, columns, seen), after


def _positions_of_all(
    length: int, counts: mx.array | None, starts: mx.array | None
) -> TokenPositions:
    offset, mask = read_whole(length, counts, starts)
    assert not isinstance(mask, str)
    if not isinstance(offset, mx.array):
        return TokenPositions(length, None, None, mask)
    begins = mx.arange(length) - offset
    return TokenPositions(length, offset, mx.arange(length) - begins[..., None], mask)
