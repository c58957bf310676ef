"""Prompts, read a chunk at a time."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ...models import Decoder
from ..sessions import Known, Sessions
from ..states import exact_lengths, joined_states, selected_rows
from .requests import Beginning, Beginnings, Row

State = Any


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
        ends: The beginnings that the last chunk has read to their ends, with their states.
        failed: The rows whose prompts it could not read, which are dropped, and why.
    """

    def __init__(self, model: Decoder, step_size: int, sessions: Sessions | None):
        self._model = model
        self._step_size = step_size
        self._exact_lengths = exact_lengths(model)
        self._sessions = sessions
        self._beginnings = Beginnings()
        self.rows: deque[Row] = deque()
        self._computed: list[State] = []
        self.tokens_read = 0
        self.ends: list[tuple[Sequence[int], State]] = []
        self.failed: list[tuple[Row, Exception]] = []

    def add(self, row: Row) -> None:
        """Begins to read the prompt of a row."""
        self.rows.append(row)
        known = Known(0, None) if self._sessions is None else self._sessions.find(row.tokens)
        state = self._model.init_state(1) if known.state is None else known.state
        row.beginning, row.cached_tokens = self._beginnings.of(
            row.tokens, row.request.marks, known.count, state
        )

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

    def take_read(self) -> list[Row]:
        """The rows whose prompts are read, all but the last token; they leave."""
        ready = [row for row in self.rows if row.beginning is not None and row.beginning.is_read]
        if ready:
            self.rows = deque(row for row in self.rows if row not in ready)
        return ready

    def _give_up(self, parts: Sequence[Beginning], error: Exception) -> None:
        """Drops the rows that wait for parts which cannot be read."""
        failed = [row for row in self.rows if _waits_for(row, parts)]
        self.rows = deque(row for row in self.rows if row not in failed)
        self.failed += [(row, error) for row in failed]

    def _next_parts(self, room: int) -> list[Beginning]:
        """What is read next, in one call; the rows that wait for it go to the end."""
        parts: list[Beginning] = []
        served, waiting = [], []
        for row in self.rows:
            assert row.beginning is not None
            part = row.beginning.next_unread()
            is_new = not part.is_read and all(part is not other for other in parts)
            if is_new and (not parts or self._fit([*parts, part], room)):
                parts.append(part)
                served.append(row)
            else:
                waiting.append(row)
        self.rows = deque([*waiting, *served])
        return parts

    def _read_parts(self, parts: Sequence[Beginning], room: int) -> int:
        """Reads so many positions at most of parts that fit together, and tells how many it read."""
        pieces = [
            part.tokens[part.position : min(part.length, part.position + room)] for part in parts
        ]
        tokens, valid = left_padded(pieces)
        state = joined_states(self._model, [part.state for part in parts])
        _, state = self._model.hidden(tokens, state, valid)
        for n, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
            own = state
            if len(parts) > 1:
                own = selected_rows(self._model, state, [n], len(piece))
            part.position += len(piece)
            part.state = own
            self.tokens_read += len(piece)
            self._computed.append(own)
            if part.is_read:
                self.ends.append((part.tokens[: part.length], own))
        return tokens.size

    def _fit(self, parts: Sequence[Beginning], room: int) -> bool:
        """Whether parts are read whole in one call.

        Only such that nothing precedes: keys and values after padding would take the slots of both. And
        only such as stay exact or are quantised from the start: padding would count as tokens.
        """
        longest = max(part.length for part in parts)
        is_padded = any(part.length < longest for part in parts)
        if is_padded and any(0 < length < longest for length in self._exact_lengths):
            return False
        return all(part.position == 0 for part in parts) and len(parts) * longest <= room


def _waits_for(row: Row, parts: Sequence[Beginning]) -> bool:
    assert row.beginning is not None
    return any(part is row.beginning.next_unread() for part in parts)
