"""The states of the rows that are written, in batches of those that are quantised alike."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import mlx.core as mx

from ...models import Decoder
from ..key_values import exact_lengths, joined_states, selected_rows
from ..reader import Reader

State = Any


@dataclass
class _Batch:
    """Rows that are read together.

    Attributes:
        reader: Has read them; once they have left it stays, for its graphs.
        places: Which rows they are.
    """

    reader: Reader
    places: list[int]


class Batches:
    """Reads one token of every row at a time.

    A batch is quantised as a whole. A row therefore leaves the batch of those whose states are exact
    when its own text is long enough, and not when a neighbour's is.

    Args:
        model: Gives the logits.
    """

    def __init__(self, model: Decoder):
        self._model = model
        self._exact_lengths = exact_lengths(model)
        self._batches: dict[int, _Batch] = {}
        self._lengths: list[int] = []

    @property
    def arrays(self) -> list[State]:
        """The states as they are, for MLX to compute."""
        return [batch.reader.arrays for batch in self._filled()]

    def join(self, states: Sequence[State], lengths: Sequence[int]) -> None:
        """Takes rows in, behind the others.

        Args:
            states: That of each, for a batch of one in the ordinary form.
            lengths: How many tokens each has read.
        """
        first = len(self._lengths)
        self._lengths += lengths
        self._add(dict(enumerate(states, first)))

    def state_of(self, place: int) -> State:
        """That of one row, for a batch of one in the ordinary form."""
        [batch] = (batch for batch in self._filled() if place in batch.places)
        return self._states(batch, [place])

    def keep(self, places: Sequence[int]) -> None:
        """Drops all rows but these."""
        for batch in self._filled():
            self._drop(batch, set(batch.places) - set(places))
        new_places = {place: n for n, place in enumerate(places)}
        for batch in self._filled():
            batch.places = [new_places[place] for place in batch.places]
        self._lengths = [self._lengths[place] for place in places]

    def read(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Reads a token of each row, `(B,)`.

        Returns:
            The logits after them, float32 `(B, V)`, and which rows are finite, `(B,)`, both yet to be
            computed.
        """
        self._move()
        self._lengths = [length + 1 for length in self._lengths]
        batches = self._filled()
        order = [place for batch in batches for place in batch.places]
        if len(batches) == 1 and order == sorted(order):
            return batches[0].reader.read(tokens)
        results = [batch.reader.read(tokens[mx.array(batch.places)]) for batch in batches]
        back = mx.argsort(mx.array(order))
        logits, finite = (mx.concatenate(list(parts))[back] for parts in zip(*results, strict=True))
        return logits, finite

    def _filled(self) -> list[_Batch]:
        return [batch for batch in self._batches.values() if batch.places]

    def _stage(self, place: int) -> int:
        """How many times the state of a row has been quantised further once it has read a token more."""
        return bisect_right(self._exact_lengths, self._lengths[place])

    def _move(self) -> None:
        """Moves the rows that the next token quantises."""
        batches = list(self._batches.items()) if self._exact_lengths else []
        for stage, batch in batches:
            moving = [place for place in batch.places if self._stage(place) != stage]
            states = {place: self._states(batch, [place]) for place in moving}
            self._drop(batch, moving)
            self._add(states)

    def _add(self, states: dict[int, State]) -> None:
        for stage, group in groupby(sorted(states, key=self._stage), self._stage):
            places = list(group)
            added = [states[place] for place in places]
            batch = self._batches.get(stage)
            if batch is None:
                reader = Reader(self._model, joined_states(self._model, added))
                self._batches[stage] = _Batch(reader, places)
                continue
            before = [batch.reader.state] if batch.places else []
            batch.reader.go_on(joined_states(self._model, [*before, *added]))
            batch.places += places

    def _drop(self, batch: _Batch, places: Iterable[int]) -> None:
        left = [place for place in batch.places if place not in places]
        if not left:
            batch.reader.arrays = ()
        elif len(left) < len(batch.places):
            batch.reader.go_on(self._states(batch, left))
        batch.places = left

    def _states(self, batch: _Batch, places: Sequence[int]) -> State:
        rows = [batch.places.index(place) for place in places]
        longest = max(self._lengths[place] for place in places)
        return selected_rows(self._model, batch.reader.state, rows, longest)
