"""The rows that are being written: all of them read one token a step, and choose the next."""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

from ...models import Decoder
from ...ops import cross_entropy
from ..decode import STEPS_PER_CACHE_CLEARING, Reader, not_finite
from ..sampling import Draw, LogitsProcessor, Sampler
from ..states import exact_lengths, joined_states, selected_rows
from .requests import Row, TokenLogprobs

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


class Logprobs:
    """Those of one step, yet to be computed.

    Args:
        logits: Those of the model, float32 `(B, V)`.
        chosen: The tokens, `(B,)`.
        wanted: How many of the likeliest tokens each row asks for; `None`: it asks for nothing.
    """

    def __init__(self, logits: mx.array, chosen: mx.array, wanted: Sequence[int | None]):
        self._counts = {place: count for place, count in enumerate(wanted) if count is not None}
        self.arrays: list[mx.array] = []
        if not self._counts:
            return
        places = mx.array(list(self._counts))
        logits, tokens = logits[places], chosen[places]
        own = -cross_entropy(logits, tokens.astype(mx.int32))
        likeliest = _likeliest(logits, max(self._counts.values()))
        # what a log-probability differs by from its logit
        total = mx.take_along_axis(logits, tokens[:, None], axis=-1) - own[:, None]
        theirs = mx.take_along_axis(logits, likeliest, axis=-1) - total
        self.arrays = [tokens, own, likeliest, theirs]

    def rows(self) -> dict[int, TokenLogprobs]:
        """By the rows that asked for them; waits until they are computed."""
        if not self._counts:
            return {}
        tokens, own, likeliest, theirs = (cast(list, array.tolist()) for array in self.arrays)
        return {
            place: TokenLogprobs(
                token, logprob, tuple(zip(ids[:count], values[:count], strict=True))
            )
            for (place, count), token, logprob, ids, values in zip(
                self._counts.items(), tokens, own, likeliest, theirs, strict=True
            )
        }


def _likeliest(logits: mx.array, count: int) -> mx.array:
    """The likeliest tokens `(B, count)`, first to last."""
    if not count:
        return mx.zeros((logits.shape[0], 0), mx.uint32)
    found = mx.argpartition(-logits, kth=count - 1, axis=-1)[:, :count]
    order = mx.argsort(-mx.take_along_axis(logits, found, axis=-1), axis=-1)
    return mx.take_along_axis(found, order, axis=-1)


Failures = dict[int, Exception]


class Choosing:
    """Chooses the next token of each row of a batch.

    Rows whose samplers and processors are equal choose together. A row's token depends on its own
    logits, history and numbers alone, whoever its neighbours are.
    """

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._chosen: mx.array | None = None

    @property
    def arrays(self) -> Any:
        """What is to be computed for the next step."""
        return [(group.seen, group.keys) for group in self._groups]

    def join(self, rows: Sequence[Row], first: int) -> None:
        """Takes rows in, which are behind the others from `first`."""
        self._look_at_chosen()
        for place, row in enumerate(rows, first):
            sampler, processors = row.request.sampler, row.request.processors
            group = next((g for g in self._groups if g.is_alike(sampler, processors)), None)
            if group is None:
                group = _Group(sampler, processors)
                self._groups.append(group)
            group.add(place, row.seen, row.key)

    def keep(self, places: Sequence[int]) -> None:
        """Drops all rows but these."""
        self._look_at_chosen()
        new_places = {place: n for n, place in enumerate(places)}
        for group in self._groups:
            group.keep(new_places)
        self._groups = [group for group in self._groups if group.places]

    def choose(self, logits: mx.array) -> tuple[mx.array, Failures]:
        """The tokens that follow, uint32 `(B,)`, and which rows failed.

        Args:
            logits: Those of all rows, float32 `(B, V)`.
        """
        self._look_at_chosen()
        failures: Failures = {}
        chosen = []
        for group in self._groups:
            try:
                chosen.append(group.choose(group.part_of(logits)).astype(mx.uint32))
            except Exception as error:
                failures |= dict.fromkeys(group.places, error)
                chosen.append(mx.zeros((len(group.places),), mx.uint32))
        if len(chosen) == 1:
            self._chosen = chosen[0]
        else:
            order = [place for group in self._groups for place in group.places]
            back = mx.argsort(mx.array(order))
            self._chosen = mx.concatenate(chosen)[back]
        return self._chosen, failures

    def _look_at_chosen(self) -> None:
        """Lets the processors see the tokens chosen last.

        As late as possible: one that must wait for a token then does so while the model reads it.
        """
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            for group in self._groups:
                group.look_at(group.part_of(chosen))


class _Group:
    """Rows whose samplers and processors are equal.

    Attributes:
        places: Which rows of the batch they are, ascending.
        seen: What each processor has seen, with these rows on axis 0.
        keys: The keys of the rows' random numbers, `(N, 2)`.
    """

    def __init__(self, sampler: Sampler, processors: Sequence[LogitsProcessor]):
        self._sampler = sampler
        self._processors = list(processors)
        self._error: Exception | None = None
        self.places: list[int] = []
        self.seen: list[State] = []
        self.keys = mx.zeros((0, 2), mx.uint32)

    def is_alike(self, sampler: Sampler, processors: Sequence[LogitsProcessor]) -> bool:
        """Whether rows with these belong here."""
        return self._sampler == sampler and self._processors == list(processors)

    def part_of(self, array: mx.array) -> mx.array:
        """The rows of the group, of an array with all rows on axis 0."""
        return array if len(self.places) == array.shape[0] else array[mx.array(self.places)]

    def add(self, place: int, seen: list[State], key: mx.array) -> None:
        if self.places:
            seen = tree_map(lambda old, new: mx.concatenate([old, new]), self.seen, seen)
        self.places.append(place)
        self.seen = seen
        self.keys = mx.concatenate([self.keys, key[None]])

    def keep(self, new_places: dict[int, int]) -> None:
        kept = [n for n, place in enumerate(self.places) if place in new_places]
        if 0 < len(kept) < len(self.places):
            index = mx.array(kept)
            self.seen, self.keys = tree_map(lambda array: array[index], (self.seen, self.keys))
        self.places = [new_places[self.places[n]] for n in kept]

    def choose(self, logits: mx.array) -> mx.array:
        if self._error is not None:
            raise self._error
        for process, seen in zip(self._processors, self.seen, strict=True):
            logits = process(logits, seen)
        if not isinstance(self._sampler, Draw):
            return self._sampler(logits)
        pairs = mx.vmap(mx.random.split)(self.keys)
        self.keys = pairs[:, 0]
        chances = mx.vmap(lambda key: mx.random.uniform(shape=(2,), key=key))(pairs[:, 1])
        return self._sampler.at(logits, chances)

    def look_at(self, tokens: mx.array) -> None:
        try:
            self.seen = [
                process.update(seen, tokens)
                for process, seen in zip(self._processors, self.seen, strict=True)
            ]
        except Exception as error:
            self._error = error


class Choice:
    """What the rows of a step chose, yet to be computed.

    Args:
        rows: The rows of the batch at that step.
        tokens: One for each, `(B,)`.
        finite: Whether the logits of each were finite, `(B,)`.
        logprobs: Those that the rows asked for.
        failures: Why some rows have no token.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokens: mx.array,
        finite: mx.array,
        logprobs: Logprobs,
        failures: Failures,
    ):
        self._rows = list(rows)
        self.arrays = [tokens, finite, *logprobs.arrays]
        self._logprobs = logprobs
        self._failures = failures

    def results(self) -> list[tuple[Row, int | Exception, TokenLogprobs | None]]:
        """Each row with its token, or why it has none; waits until they are computed."""
        tokens, finite = (cast(list, array.tolist()) for array in self.arrays[:2])
        logprobs = self._logprobs.rows()
        return [
            (
                row,
                self._failures.get(n) or (token if is_finite else not_finite()),
                logprobs.get(n),
            )
            for n, (row, token, is_finite) in enumerate(
                zip(self._rows, tokens, finite, strict=True)
            )
        ]


class Writing:
    """Rows that are written: while one step's tokens are handled, the next is computed.

    Args:
        model: Gives the logits.
    """

    def __init__(self, model: Decoder):
        self._is_on_cpu = mx.default_device() == mx.Device(mx.cpu)
        self._batches = Batches(model)
        self._choosing = Choosing()
        self._tokens = mx.zeros((0,), mx.uint32)
        self._steps = 0
        self.rows: list[Row] = []

    def join(self, rows: Sequence[Row], states: Sequence[State]) -> None:
        """Takes rows in, whose states are those after all of their tokens but the last.

        Args:
            rows: The rows.
            states: That of each, for a batch of one in the ordinary form.
        """
        self._choosing.join(rows, len(self.rows))
        last = mx.array([row.read[-1] for row in rows], mx.uint32)
        self._tokens = mx.concatenate([self._tokens, last])
        self.rows += rows
        self._batches.join(states, [row.read_count - 1 for row in rows])

    def state_of(self, row: Row) -> State:
        """What the model keeps of the tokens of a row that it has read, for a batch of one."""
        return self._batches.state_of(self.rows.index(row))

    def leave(self, leaving: Collection[Row]) -> None:
        """Drops rows."""
        going = [n for n, row in enumerate(self.rows) if row not in leaving]
        if len(going) == len(self.rows):
            return
        self.rows = [self.rows[n] for n in going]
        self._choosing.keep(going)
        self._batches.keep(going)
        self._tokens = self._tokens[mx.array(going, mx.uint32)]

    def step(self) -> Choice:
        """Starts to compute the next token of each row, of which there is one at least."""
        before = self._batches.arrays
        logits, finite = self._batches.read(self._tokens)
        if self._is_on_cpu:
            # its memory is written to in place once nothing is to compute it any more
            mx.eval(before)
        del before
        if self._is_on_cpu:
            # apart, so that the state can be waited for while the logits are computed: whatever is
            # started together is held until all of it is there
            mx.async_eval(self._batches.arrays)
        self._tokens, failures = self._choosing.choose(logits)
        wanted = [row.request.top_logprobs for row in self.rows]
        logprobs = Logprobs(logits, self._tokens, wanted)
        choice = Choice(self.rows, self._tokens, finite, logprobs, failures)
        state = [] if self._is_on_cpu else self._batches.arrays
        mx.async_eval(choice.arrays, self._choosing.arrays, state)
        self._steps += 1
        if self._steps % STEPS_PER_CACHE_CLEARING == 0:
            mx.clear_cache()
        return choice
