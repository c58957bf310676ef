"""Reads one token of many texts at a time."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from mlx.utils import tree_map

from ...models import Decoder
from ..reader import Reader
from ..sampling import Draw, LogitsProcessor, Sampler
from ..states import concatenated_states, exact_lengths, selected_rows
from .choices import drawn
from .rows import Row, State


@dataclass
class _Batch:
    """Rows that are read together.

    Attributes:
        reader: Has read them; once they have left it stays, for its graphs.
        indices: Which rows they are.
        before: By mixers, the states before the last token, where each token makes them anew.
    """

    reader: Reader
    indices: list[int]
    before: list[State | None] = field(default_factory=list)


class Batches:
    """Reads one token of every row at a time.

    A batch is quantised as a whole. A row therefore leaves the batch of those whose states are exact
    when its own text is long enough, and not when a neighbour's is.

    Args:
        model: Gives the logits.
        known: How many tokens have a text.
        holds: Whether states before the last token may be asked for.

    Attributes:
        by_stage: The batches, some without rows, by how many of the exact lengths their rows reach.
    """

    def __init__(self, model: Decoder, known: int, holds: bool):
        self._model = model
        self._known = known
        self._exact_lengths = exact_lengths(model)
        self._holds = [holds and mixer.state_kind.is_renewed for mixer in model.token_mixers]
        self.by_stage: dict[int, _Batch] = {}
        self._lengths: list[int] = []

    def join(self, states: dict[int, State], lengths: Sequence[int] = ()) -> None:
        """Takes rows in, to be read with those that are quantised alike after one token more.

        Args:
            states: By the indices of the rows, each for a batch of one in the ordinary variant.
            lengths: How many tokens each has read, of rows that are new and come after the others.
        """
        self._lengths += lengths
        stages: dict[int, list[int]] = {}
        for index in states:
            stage = bisect_right(self._exact_lengths, self._lengths[index])
            stages.setdefault(stage, []).append(index)
        for stage, indices in stages.items():
            added = [states[index] for index in indices]
            batch = self.by_stage.get(stage)
            if batch is None:
                state = concatenated_states(self._model, added)
                reader = Reader(self._model, state, self._known)
                self.by_stage[stage] = _Batch(reader, indices)
                continue
            before = [batch.reader.state] if batch.indices else []
            batch.reader.go_on(concatenated_states(self._model, [*before, *added]))
            batch.indices += indices

    def state_of(self, indices: Sequence[int]) -> State:
        """The state of rows which are read together, in the ordinary variant."""
        [batch] = (batch for batch in self.by_stage.values() if indices[0] in batch.indices)
        if indices == batch.indices:
            return batch.reader.state
        rows = [batch.indices.index(index) for index in indices]
        longest = max(self._lengths[index] for index in indices)
        return selected_rows(self._model, batch.reader.state, rows, longest)

    def before_last(self, index: int) -> list[State | None]:
        """By mixers, the state of one row before the last token that was read, where it was stored."""
        [batch] = (batch for batch in self.by_stage.values() if index in batch.indices)
        row = batch.indices.index(index)
        return [
            None if state is None else tree_map(lambda array: array[row : row + 1], state)
            for state in batch.before
        ]

    def keep(self, indices: Sequence[int]) -> None:
        """Drops all rows but these."""
        for batch in self.by_stage.values():
            self._drop(batch, set(batch.indices) - set(indices))
        new_indices = {index: n for n, index in enumerate(indices)}
        for batch in self.by_stage.values():
            batch.indices = [new_indices[index] for index in batch.indices]
        self._lengths = [self._lengths[index] for index in indices]

    def read(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Reads a token of each row, `(B,)`.

        Returns:
            The logits after them, float32 `(B, V)`, and which rows are finite, `(B,)`, both yet to be
            computed.
        """
        if self._exact_lengths:
            self._move()
        self._lengths = [length + 1 for length in self._lengths]
        batches = [batch for batch in self.by_stage.values() if batch.indices]
        for batch in batches:
            pairs = zip(self._holds, batch.reader.arrays, strict=True)
            batch.before = [state if holds else None for holds, state in pairs]
        order = [index for batch in batches for index in batch.indices]
        if len(batches) == 1 and order == sorted(order):
            return batches[0].reader.read(tokens)
        results = [batch.reader.read(tokens[mx.array(batch.indices)]) for batch in batches]
        back = mx.argsort(mx.array(order))
        logits, finite = (mx.concatenate(list(parts))[back] for parts in zip(*results, strict=True))
        return logits, finite

    def _move(self) -> None:
        """Moves the rows that the next token quantises."""
        stages = [bisect_right(self._exact_lengths, length) for length in self._lengths]
        for stage, batch in list(self.by_stage.items()):
            moving = [index for index in batch.indices if stages[index] != stage]
            states = {index: self.state_of([index]) for index in moving}
            self._drop(batch, moving)
            self.join(states)

    def _drop(self, batch: _Batch, indices: Iterable[int]) -> None:
        left = [index for index in batch.indices if index not in indices]
        if not left:
            batch.reader.arrays = ()
        elif len(left) < len(batch.indices):
            batch.reader.go_on(self.state_of(left))
        batch.indices = left


@dataclass(eq=False)
class _Group:
    """Rows whose samplers and processors are equal, which choose their tokens together.

    A row's token depends on its own logits, history and numbers alone, whoever its neighbours are.

    Attributes:
        sampler: Chooses the tokens of all of the rows.
        processors: Change the logits of all of the rows before.
        indices: Which rows of the batch they are, ascending.
        seen: What each processor has seen, with these rows on axis 0.
        keys: The keys of the rows' random numbers, `(N, 2)`.
        error: Why they can choose no more.
    """

    sampler: Sampler
    processors: list[LogitsProcessor]
    indices: list[int] = field(default_factory=list)
    seen: list[State] = field(default_factory=list)
    keys: mx.array = field(default_factory=lambda: mx.zeros((0, 2), mx.uint32))
    error: Exception | None = None

    def add(self, index: int, row: Row) -> None:
        """Takes a row in, after the others."""
        seen = row.seen
        if self.indices:
            seen = tree_map(lambda old, new: mx.concatenate([old, new]), self.seen, seen)
        self.seen = seen
        self.keys = mx.concatenate([self.keys, row.key[None]])
        self.indices.append(index)

    def keep(self, new_indices: dict[int, int]) -> None:
        """Drops all rows but these, which get new indices."""
        remaining = [n for n, index in enumerate(self.indices) if index in new_indices]
        if 0 < len(remaining) < len(self.indices):
            chosen = mx.array(remaining)
            self.seen, self.keys = tree_map(lambda array: array[chosen], (self.seen, self.keys))
        self.indices = [new_indices[self.indices[n]] for n in remaining]

    def part_of(self, array: mx.array) -> mx.array:
        """The rows of the group, of an array with all rows on axis 0."""
        return array if len(self.indices) == array.shape[0] else array[mx.array(self.indices)]

    def choose(self, logits: mx.array) -> mx.array:
        """The tokens of the rows, of the logits of all rows."""
        if self.error is not None:
            raise self.error
        logits = self.part_of(logits)
        for process, seen in zip(self.processors, self.seen, strict=True):
            logits = process(logits, seen)
        if not isinstance(self.sampler, Draw):
            return self.sampler(logits).astype(mx.uint32)
        self.keys, chosen = drawn(self.sampler, logits, self.keys)
        return chosen
