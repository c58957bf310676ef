"""The rows that are being written: all of them read one token a step, and choose the next."""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

from ...models import Decoder
from ...ops import cross_entropy
from ..decode import STEPS_PER_CACHE_CLEARING, Reader, not_finite
from ..sampling import Draw, LogitsProcessor, Sampler
from ..states import exact_lengths, joined_states, selected_rows, state_before
from .requests import Row, TokenLogprobs

State = Any


@dataclass
class _Batch:
    """Rows that are read together.

    Attributes:
        reader: Has read them; once they have left it stays, for its graphs.
        places: Which rows they are.
        before: By mixers, the states before the last token, where each token makes them anew.
    """

    reader: Reader
    places: list[int]
    before: list[State | None] = field(default_factory=list)


class Batches:
    """Reads one token of every row at a time.

    A batch is quantised as a whole. A row therefore leaves the batch of those whose states are exact
    when its own text is long enough, and not when a neighbour's is.

    Args:
        model: Gives the logits.
        holds: Whether states before the last token may be asked for.
    """

    def __init__(self, model: Decoder, holds: bool):
        self._model = model
        self._exact_lengths = exact_lengths(model)
        self._holds = [holds and mixer.state_kind.is_renewed for mixer in model.token_mixers]
        self._batches: dict[int, _Batch] = {}
        self._lengths: list[int] = []

    def filled(self) -> list[_Batch]:
        """The batches that have rows."""
        return [batch for batch in self._batches.values() if batch.places]

    def join(self, states: dict[int, State], lengths: Sequence[int] = ()) -> None:
        """Takes rows in, to be read with those that are quantised alike after one token more.

        Args:
            states: By the places of the rows, for a batch of one in the ordinary form.
            lengths: How many tokens each has read, of rows that are new and come after the others.
        """
        self._lengths += lengths
        stages: dict[int, list[int]] = {}
        for place in states:
            stage = bisect_right(self._exact_lengths, self._lengths[place])
            stages.setdefault(stage, []).append(place)
        for stage, places in stages.items():
            added = [states[place] for place in places]
            batch = self._batches.get(stage)
            if batch is None:
                reader = Reader(self._model, joined_states(self._model, added))
                self._batches[stage] = _Batch(reader, places)
                continue
            before = [batch.reader.state] if batch.places else []
            batch.reader.go_on(joined_states(self._model, [*before, *added]))
            batch.places += places

    def state_of(self, place: int) -> State:
        """That of one row, for a batch of one in the ordinary form."""
        [batch] = (batch for batch in self.filled() if place in batch.places)
        return self._states(batch, [place])

    def before_last(self, place: int) -> list[State | None]:
        """By mixers, the state of one row before the last token that was read, where it was held."""
        [batch] = (batch for batch in self.filled() if place in batch.places)
        row = batch.places.index(place)
        return [
            None if state is None else tree_map(lambda array: array[row : row + 1], state)
            for state in batch.before
        ]

    def keep(self, places: Sequence[int]) -> None:
        """Drops all rows but these."""
        for batch in self.filled():
            self._drop(batch, set(batch.places) - set(places))
        new_places = {place: n for n, place in enumerate(places)}
        for batch in self.filled():
            batch.places = [new_places[place] for place in batch.places]
        self._lengths = [self._lengths[place] for place in places]

    def read(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Reads a token of each row, `(B,)`.

        Returns:
            The logits after them, float32 `(B, V)`, and which rows are finite, `(B,)`, both yet to be
            computed.
        """
        if self._exact_lengths:
            self._move()
        self._lengths = [length + 1 for length in self._lengths]
        batches = self.filled()
        for batch in batches:
            pairs = zip(self._holds, batch.reader.arrays, strict=True)
            batch.before = [state if holds else None for holds, state in pairs]
        order = [place for batch in batches for place in batch.places]
        if len(batches) == 1 and order == sorted(order):
            return batches[0].reader.read(tokens)
        results = [batch.reader.read(tokens[mx.array(batch.places)]) for batch in batches]
        back = mx.argsort(mx.array(order))
        logits, finite = (mx.concatenate(list(parts))[back] for parts in zip(*results, strict=True))
        return logits, finite

    def _move(self) -> None:
        """Moves the rows that the next token quantises."""
        stages = [bisect_right(self._exact_lengths, length) for length in self._lengths]
        for stage, batch in list(self._batches.items()):
            moving = [place for place in batch.places if stages[place] != stage]
            states = {place: self._states(batch, [place]) for place in moving}
            self._drop(batch, moving)
            self.join(states)

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
    """The log-probabilities of one step, yet to be computed.

    Args:
        logits: Those of the model, float32 `(B, V)`.
        chosen: The tokens, `(B,)`.
        counts: How many of the likeliest tokens each row asks for, by the rows that do, one at least.
    """

    def __init__(self, logits: mx.array, chosen: mx.array, counts: dict[int, int]):
        self._counts = counts
        places = mx.array(list(counts))
        logits, tokens = logits[places], chosen[places]
        own = -cross_entropy(logits, tokens.astype(mx.int32))
        likeliest = _likeliest(logits, max(counts.values()))
        # what a log-probability differs by from its logit
        total = mx.take_along_axis(logits, tokens[:, None], axis=-1) - own[:, None]
        theirs = mx.take_along_axis(logits, likeliest, axis=-1) - total
        self.arrays = [tokens, own, likeliest, theirs]

    def rows(self) -> dict[int, TokenLogprobs]:
        """By the rows that asked for them; waits until they are computed."""
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


def drawn(sampler: Draw, logits: mx.array, keys: mx.array) -> tuple[mx.array, mx.array]:
    """The next keys `(B, 2)`, and the tokens `(B,)` that each row draws with its own."""
    pairs = mx.vmap(mx.random.split)(keys)
    chances = mx.vmap(lambda key: mx.random.uniform(shape=(2,), key=key))(pairs[:, 1])
    return pairs[:, 0], sampler.at(logits, chances).astype(mx.uint32)


@dataclass(eq=False)
class _Group:
    """Rows whose samplers and processors are equal, which choose their tokens together.

    A row's token depends on its own logits, history and numbers alone, whoever its neighbours are.

    Attributes:
        sampler, processors: Those of the rows.
        places: Which rows of the batch they are, ascending.
        seen: What each processor has seen, with these rows on axis 0.
        keys: The keys of the rows' random numbers, `(N, 2)`.
        error: Why they can choose no more.
    """

    sampler: Sampler
    processors: list[LogitsProcessor]
    places: list[int] = field(default_factory=list)
    seen: list[State] = field(default_factory=list)
    keys: mx.array = field(default_factory=lambda: mx.zeros((0, 2), mx.uint32))
    error: Exception | None = None

    def add(self, place: int, row: Row) -> None:
        """Takes a row in, after the others."""
        seen = row.seen
        if self.places:
            seen = tree_map(lambda old, new: mx.concatenate([old, new]), self.seen, seen)
        self.seen = seen
        self.keys = mx.concatenate([self.keys, row.key[None]])
        self.places.append(place)

    def keep(self, new_places: dict[int, int]) -> None:
        """Drops all rows but these, which get new places."""
        kept = [n for n, place in enumerate(self.places) if place in new_places]
        if 0 < len(kept) < len(self.places):
            index = mx.array(kept)
            self.seen, self.keys = tree_map(lambda array: array[index], (self.seen, self.keys))
        self.places = [new_places[self.places[n]] for n in kept]

    def part_of(self, array: mx.array) -> mx.array:
        """The rows of the group, of an array with all rows on axis 0."""
        return array if len(self.places) == array.shape[0] else array[mx.array(self.places)]

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

    def look_at(self, chosen: mx.array) -> None:
        """Lets the processors see the tokens of all rows."""
        try:
            tokens = self.part_of(chosen)
            self.seen = [
                process.update(seen, tokens)
                for process, seen in zip(self.processors, self.seen, strict=True)
            ]
        except Exception as error:
            self.error = error


@dataclass(frozen=True)
class Choice:
    """What the rows of a step chose, yet to be computed.

    Attributes:
        rows: The rows of the batch at that step.
        tokens: One for each, `(B,)`.
        finite: Whether the logits of each were finite, `(B,)`.
        failures: Why some rows have no token.
        logprobs: Those that the rows asked for; `None`: they asked for none.
    """

    rows: list[Row]
    tokens: mx.array
    finite: mx.array
    failures: dict[int, Exception]
    logprobs: Logprobs | None

    def results(self) -> list[tuple[Row, int | Exception, TokenLogprobs | None]]:
        """Each row with its token, or why it has none; waits until they are computed."""
        tokens, finite = (cast(list, array.tolist()) for array in (self.tokens, self.finite))
        logprobs = {} if self.logprobs is None else self.logprobs.rows()
        return [
            (row, self.failures.get(n) or (token if is_finite else not_finite()), logprobs.get(n))
            for n, (row, token, is_finite) in enumerate(zip(self.rows, tokens, finite, strict=True))
        ]


class Writing:
    """Rows that are written: while one step's tokens are handled, the next is computed.

    Args:
        model: Gives the logits.
        keeps: Whether states of rows are to be kept.
    """

    def __init__(self, model: Decoder, keeps: bool = False):
        self._model = model
        self._is_on_cpu = mx.default_device() == mx.Device(mx.cpu)
        self._batches = Batches(model, keeps)
        self._groups: list[_Group] = []
        self._tokens = mx.zeros((0,), mx.uint32)
        # the processors have not seen them yet
        self._are_new = False
        self._steps = 0
        self.rows: list[Row] = []

    def join(self, rows: Sequence[Row], states: Sequence[State]) -> None:
        """Takes rows in, whose states are those after all of their tokens but the last.

        Args:
            rows: The rows.
            states: That of each, for a batch of one in the ordinary form.
        """
        self._look_at_chosen()
        for place, row in enumerate(rows, len(self.rows)):
            wanted = row.request.sampler, list(row.request.processors)
            alike = (g for g in self._groups if (g.sampler, g.processors) == wanted)
            group = next(alike, None)
            if group is None:
                group = _Group(*wanted)
                self._groups.append(group)
            group.add(place, row)
        read = [row.read for row in rows]
        last = mx.array([tokens[-1] for tokens in read], mx.uint32)
        self._tokens = mx.concatenate([self._tokens, last])
        places = range(len(self.rows), len(self.rows) + len(rows))
        self.rows += rows
        by_place = dict(zip(places, states, strict=True))
        self._batches.join(by_place, [len(tokens) - 1 for tokens in read])

    def state_of(self, row: Row) -> State:
        """What the model keeps of the tokens of a row that it has read, for a batch of one."""
        return self._batches.state_of(self.rows.index(row))

    def key_of(self, row: Row) -> mx.array:
        """That of a row's next random numbers."""
        place = self.rows.index(row)
        [group] = (group for group in self._groups if place in group.places)
        return group.keys[group.places.index(place)]

    def hold(self) -> None:
        """Holds the states before what is, or may become, the stop string of a row."""
        for place, row in enumerate(self.rows):
            if not row.completion.is_cut:
                row.held = None
            elif row.held is None:
                row.held = len(row.read) - 1, self._batches.before_last(place)

    def kept_of(self, row: Row) -> list[tuple[list[int], State]]:
        """The tokens of a row that another text may begin with, and the state after them.

        What has ended a text is no part of it: the end token, or a stop string. Where the last token
        may yet complete one, both are kept.
        """
        place = self.rows.index(row)
        read, state = row.read, self._batches.state_of(place)
        has_ended = row.completion.finish_reason is not None
        if not has_ended and row.held is None:
            return [(read, state)]
        count, held = row.held or (len(read) - 1, self._batches.before_last(place))
        before = state_before(self._model, state, len(read), len(read) - count, held)
        if before is None:
            return [(read, state)]
        return [(read[:count], before), *([] if has_ended else [(read, state)])]

    def leave(self, leaving: Collection[Row]) -> None:
        """Drops rows."""
        going = [n for n, row in enumerate(self.rows) if row not in leaving]
        if len(going) == len(self.rows):
            return
        self.rows = [self.rows[n] for n in going]
        self._look_at_chosen()
        new_places = {place: n for n, place in enumerate(going)}
        for group in self._groups:
            group.keep(new_places)
        self._groups = [group for group in self._groups if group.places]
        self._batches.keep(going)
        self._tokens = self._tokens[mx.array(going, mx.uint32)]

    def step(self) -> Choice:
        """Starts to compute the next token of each row, of which there is one at least."""
        before = [batch.reader.arrays for batch in self._batches.filled()]
        logits, finite = self._batches.read(self._tokens)
        if self._is_on_cpu:
            # its memory is written to in place once nothing is to compute it any more
            mx.eval(before)
        del before
        state = [batch.reader.arrays for batch in self._batches.filled()]
        if self._is_on_cpu:
            # apart, so that the state can be waited for while the logits are computed: whatever is
            # started together is held until all of it is there
            mx.async_eval(state)
            state = []
        self._look_at_chosen()
        failures: dict[int, Exception] = {}
        chosen = []
        for group in self._groups:
            try:
                chosen.append(group.choose(logits))
            except Exception as error:
                failures |= dict.fromkeys(group.places, error)
                chosen.append(mx.zeros((len(group.places),), mx.uint32))
        self._tokens = chosen[0]
        if len(chosen) > 1:
            order = [place for group in self._groups for place in group.places]
            back = mx.argsort(mx.array(order))
            self._tokens = mx.concatenate(chosen)[back]
        self._are_new = True
        counts = {
            place: row.request.top_logprobs
            for place, row in enumerate(self.rows)
            if row.request.top_logprobs is not None
        }
        logprobs = Logprobs(logits, self._tokens, counts) if counts else None
        shown = [] if logprobs is None else logprobs.arrays
        drawn = [(group.seen, group.keys) for group in self._groups]
        mx.async_eval([self._tokens, finite, *shown], drawn, state)
        self._steps += 1
        if self._steps % STEPS_PER_CACHE_CLEARING == 0:
            mx.clear_cache()
        return Choice(list(self.rows), self._tokens, finite, failures, logprobs)

    def _look_at_chosen(self) -> None:
        """Lets the processors see the tokens chosen last.

        As late as possible: one that must wait for a token then does so while the model reads it.
        """
        if self._are_new:
            self._are_new = False
            for group in self._groups:
                group.look_at(self._tokens)
