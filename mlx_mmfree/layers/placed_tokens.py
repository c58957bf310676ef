"""What tokens whose weights follow from their places see of each other."""

from typing import NamedTuple

import mlx.core as mx

from .context import Context
from .key_value_mixer import HeldTokens
from .key_value_reading import extend, read, read_whole
from .key_value_state import KeyValueState
from .padding import RealTokens


class Places(NamedTuple):
    """Where the tokens of a call, and those that they see, stand in their samples.

    Attributes:
        length: Number of tokens `L` of the call.
        rows: The place of each, `(B, L)` or `(1, L)`; `None`: from 0 on.
        columns: The place of each token that is seen, from the view of each, `(B, L, N)` or `(B, 1, N)`;
            `None`: from 0 on.
        seen: What each sees, booleans that fit `(B, 1, L, N)`; `None`: all.
    """

    length: int
    rows: mx.array | None
    columns: mx.array | None
    seen: mx.array | None

    def weights(self, table: mx.array) -> mx.array:
        """The weights of a table for all pairs of places, `(H, M, M)`, as `(B or 1, H, L, N)`."""
        return self.columns_of(self.rows_of(table))

    def rows_of(self, table: mx.array) -> mx.array:
        """The rows of the tokens of a call, `(B or 1, H, L, M)`, of `(H, M, M)`."""
        if self.rows is None:
            return table[None, :, : self.length]
        return mx.take(table, mx.minimum(self.rows, table.shape[1] - 1), axis=1).swapaxes(0, 1)

    def columns_of(self, rows: mx.array) -> mx.array:
        """What rows `(B or 1, H, L, M)` hold for the tokens that are seen, `(B or 1, H, L, N)`."""
        if self.columns is None:
            return rows[..., : self.length]
        columns = mx.clip(self.columns, 0, rows.shape[-1] - 1)[:, None]
        batch = max(rows.shape[0], columns.shape[0])
        shape = (batch, *rows.shape[1:3])
        rows = mx.broadcast_to(rows, (*shape, rows.shape[-1]))
        columns = mx.broadcast_to(columns, (*shape, columns.shape[-1]))
        return mx.take_along_axis(rows, columns, axis=-1)


def read_placed(
    keys: mx.array, values: mx.array, state: HeldTokens, context: Context, tokens: RealTokens
) -> tuple[mx.array, mx.array, Places, HeldTokens]:
    """Adds the tokens of a call to those of a state, and says where all stand.

    Args:
        keys: `(B, G, L, K)`.
        values: `(B, G, L, V)`.
        state: The tokens before, if the mixer is causal; `()`: every token sees the whole sample.
        context: The call.
        tokens: Those of the call that are no padding.

    Returns:
        The keys and values that are seen, `(B, G, N, K)` and `(B, G, N, V)`, the places and the state.
    """
    length, (counts, starts) = values.shape[2], tokens
    if not isinstance(state, KeyValueState):
        places = context.once(
            ("places of all", length), lambda: _places_of_all(length, counts, starts)
        )
        return keys, values, places, state
    which, before = (state.used, length, None, 0, 1), state.positions
    reading = context.once(("reading", *which), lambda: read(before, length, counts, starts))
    keys, values, after = extend(state, keys, values, reading)
    seen = reading.mask
    if reading.seen is None and reading.begins is None:
        token = mx.arange(length)
        mask = token <= token[:, None] if isinstance(seen, str) else seen
        return keys, values, Places(length, None, None, mask), after
    rows = reading.places
    columns = (mx.arange(length)[None] if reading.seen is None else reading.seen)[:, None]
    if reading.begins is not None:
        rows = rows - reading.begins
        columns = columns - reading.begins[..., None]
    assert not isinstance(seen, str)
    return keys, values, Places(length, rows, columns, seen), after


def _places_of_all(length: int, counts: mx.array | None, starts: mx.array | None) -> Places:
    offset, mask = read_whole(length, counts, starts)
    assert not isinstance(mask, str)
    if not isinstance(offset, mx.array):
        return Places(length, None, None, mask)
    begins = mx.arange(length) - offset
    return Places(length, offset, mx.arange(length) - begins[..., None], mask)
