"""Prompts that are read in turn, a chunk at a time."""

from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np

from ...models import Decoder
from ..sessions import Known, Sessions
from ..states import exact_lengths, selected_rows, without_spare_slots
from .rows import Prefix, Row, State


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[mx.array, mx.array | None]:
    """Several sequences as one batch, the shorter ones padded on the left.

    Args:
        rows: The ids of each sequence, checked before and at least one each.

    Returns:
        Tokens, `int32` `(B, L)`, and booleans `(B, L)` that are `False` where padded; `None` where
        all are equally long.
    """
    length = max(map(len, rows))
    padding = np.array([length - len(row) for row in rows])
    tokens = np.zeros((len(rows), length), np.int32)
    for row, ids, missing in zip(tokens, rows, padding, strict=True):
        row[missing:] = ids
    valid = np.arange(length) >= padding[:, None]
    return mx.array(tokens), mx.array(valid) if padding.any() else None


class PromptReading:
    """The prompts that are being read, in turn: one chunk of the first, which then goes to the end.

    Prompts after it that fit into the same chunk as a whole are read with it.

    Args:
        model: Reads them.
        step_size: Positions of a chunk, padding included.
        sessions: Where states are found; `None`: nowhere.

    Attributes:
        rows: Those whose prompts they are, in turn.
        tokens_read: How many tokens were read so far.
        ends: The prefixes that the last chunk has read to their ends, with their states.
        failed: The rows whose prompts it could not read, which are dropped, and why.
    """

    def __init__(self, model: Decoder, step_size: int, sessions: Sessions | None):
        self._model = model
        self._step_size = step_size
        self._exact_lengths = exact_lengths(model)
        self._sessions = sessions
        # what is being read, by its length and digest, so that prompts which are alike share it
        self._prefixes: WeakValueDictionary[tuple[int, bytes], Prefix] = WeakValueDictionary()
        self.rows: deque[Row] = deque()
        self._computed: list[State] = []
        self.tokens_read = 0
        self.ends: list[tuple[Sequence[int], State]] = []
        self.failed: list[tuple[Row, Exception]] = []

    def add(self, row: Row) -> None:
        """Begins to read a prompt but its last token, in parts that end at its breakpoints."""
        self.rows.append(row)
        known = Known(0, None) if self._sessions is None else self._sessions.find(row.tokens)
        position, start = known.count, 0
        digest, array = blake2b(digest_size=16), np.array(row.tokens, np.int32)
        whole: Prefix | None = None
        for end in row.ends:
            if end <= position and end < len(row.tokens) - 1:
                continue
            digest.update(array[start:end].tobytes())
            start, key = end, (end, digest.digest())
            shared = self._prefixes.get(key)
            if shared is None:
                whole = Prefix(row.tokens, end, whole, position, known.state)
                self._prefixes[key] = whole
            else:
                # read, or to be read, for another prompt
                whole, position = shared, end
        row.prefix, row.cached_tokens, row.num_stored = whole, position, known.count

    def drop_over(self) -> None:
        """Forgets the prompts of rows that are over."""
        self.rows = deque(row for row in self.rows if not row.is_over)

    def read(self) -> None:
        """Reads one chunk, if a prompt is there; it is computed while the caller goes on."""
        if self._computed:
            # never more than one chunk ahead
            mx.eval(self._computed)
            self._computed = []
            mx.clear_cache()
        self.ends, self.failed = [], []
        left = self._step_size
        while left > 0 and (parts := self._next_parts(left)):
            try:
                left -= self._read_parts(parts, left)
            except Exception as error:
                self._give_up(parts, error)
        mx.async_eval(self._computed)

    def _give_up(self, parts: Sequence[Prefix], error: Exception) -> None:
        """Drops the rows that wait for parts which cannot be read."""
        failed = [row for row in self.rows if _waits_for(row, parts)]
        self.rows = deque(row for row in self.rows if row not in failed)
        self.failed += [(row, error) for row in failed]

    def _next_parts(self, capacity: int) -> list[Prefix]:
        """The texts that are read next, in one call; the rows that wait for it go to the end."""
        parts: list[Prefix] = []
        served, waiting = [], []
        for row in self.rows:
            assert row.prefix is not None
            part = row.prefix.next_unread()
            is_new = not part.is_read and all(part is not other for other in parts)
            if is_new and (not parts or self._fit([*parts, part], capacity)):
                parts.append(part)
                served.append(row)
            else:
                waiting.append(row)
        self.rows = deque([*waiting, *served])
        return parts

    def _read_parts(self, parts: Sequence[Prefix], capacity: int) -> int:
        """Reads so many positions at most of parts that fit together, and tells how many it read."""
        chunks = [
            part.tokens[part.position : min(part.length, part.position + capacity)]
            for part in parts
        ]
        tokens, valid = left_padded(chunks)
        # of several parts, each begins anew
        _, state = self._model.hidden(tokens, parts[0].state, valid)
        # computed while the rows are taken apart
        mx.async_eval(state)
        for n, (part, chunk) in enumerate(zip(parts, chunks, strict=True)):
            own = state
            if len(parts) > 1:
                own = selected_rows(self._model, state, [n], len(chunk))
            part.position += len(chunk)
            part.state = own
            self.tokens_read += len(chunk)
            self._computed.append(own)
            if part.is_read and self._sessions is not None and not self._sessions.serves_all:
                # what goes on from here is written to memory that nothing else holds
                own_copy = without_spare_slots(self._model, own, part.length)
                self._computed.append(own_copy)
                self.ends.append((part.tokens[: part.length], own_copy))
        return tokens.size

    def _fit(self, parts: Sequence[Prefix], capacity: int) -> bool:
        """Returns whether parts are read whole in one call.

        Only such that nothing precedes: keys and values after padding would take the slots of both. And
        only such as stay exact or are quantised from the start: padding would count as tokens.
        """
        longest = max(part.length for part in parts)
        is_padded = any(part.length < longest for part in parts)
        if is_padded and any(0 < length < longest for length in self._exact_lengths):
            return False
        return all(part.position == 0 for part in parts) and len(parts) * longest <= capacity


def _waits_for(row: Row, parts: Sequence[Prefix]) -> bool:
    assert row.prefix is not None
    return any(part is row.prefix.next_unread() for part in parts)
