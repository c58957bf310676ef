"""Requests, what becomes of them, and the rows that are written: all read one token a step."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

from ...models import Decoder
from ...ops import cross_entropy
from ..decode import STEPS_PER_CACHE_CLEARING, Completion, FinishReason, Reader, TextEnd
from ..sampling import Draw, LogitsProcessor, Sampler, greedy
from ..states import exact_lengths, joined_states, selected_rows, state_before

State = Any


@dataclass(frozen=True)
class Request:
    """One text to continue.

    Attributes:
        tokens: The ids of the whole prompt, at least one.
        max_tokens: How many tokens to generate at most; fewer where the model's longest text ends.
        sampler: Chooses tokens from logits; see `make_sampler`.
        processors: Change the logits before; see `make_processors`. Their states belong to the text.
        stop: Strings that end the text and are not shown.
        ending: Makes what ends the text instead of `stop`; `None`: nothing else does.
        end: Tokens that end the text.
        seed: Of the text's own random numbers, which no other text changes; `None`: one is drawn from
            MLX's generator. A sampler that is not of `make_sampler` uses that generator at each token.
        top_logprobs: How many of the likeliest tokens are told with their log-probabilities at each
            step; 0: only the chosen one; `None`: none.
        marks: Numbers of tokens of the prompt after which the state is kept too, such as at the ends
            of messages. Prompts that are alike up to a mark are read once up to there.
        is_answer: Whether the text is a text of its own, and does not go on from the prompt's last word.

    Example:
        >>> request = Request([1, 2, 3], max_tokens=20, seed=7)
        >>> request.max_tokens
        20
    """

    tokens: Sequence[int]
    max_tokens: int = 100
    sampler: Sampler = greedy
    processors: Sequence[LogitsProcessor] = ()
    stop: Sequence[str] = ()
    ending: Callable[[], TextEnd] | None = None
    end: Collection[int] = ()
    seed: int | None = None
    top_logprobs: int | None = None
    marks: Sequence[int] = ()
    is_answer: bool = False


@dataclass(frozen=True)
class TokenLogprobs:
    """The model's probabilities of one step, before penalties and temperature.

    Attributes:
        token: The token that was chosen.
        logprob: The logarithm of its probability.
        top: The likeliest tokens with theirs, first to last.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Event:
    """One step of one request.

    Attributes:
        request: The number that `Scheduler.submit` gave it.
        text: The text that this step adds, possibly none.
        token: The token that was chosen; `None` where the request failed.
        logprobs: Its log-probability and the likeliest tokens', if they were asked for.
        finish_reason: `"stop"` at a stop string or the end of the text, `"length"` at the last token
            allowed, otherwise `None`.
        prompt_tokens: Number of tokens of the prompt.
        cached_tokens: How many of them were known, or read for another request.
        error: Why this request, alone, has failed; it is then over.
        stop_string: The stop string that has ended the text, if one has.
    """

    request: int
    text: str
    token: int | None
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    prompt_tokens: int
    cached_tokens: int
    error: Exception | None = None
    stop_string: str | None = None


@dataclass(eq=False)
class Beginning:
    """The first tokens of one or several prompts, and what the model keeps of them.

    Attributes:
        tokens: A prompt.
        length: How many of its tokens they are.
        before: A shorter beginning of it, to go on from; `None`: `state` is where to go on.
        position: How many tokens `state` has read.
        state: What the model keeps of them, in the ordinary form, for a batch of one; `None`: nothing.
    """

    tokens: Sequence[int]
    length: int
    before: "Beginning | None"
    position: int
    state: State

    @property
    def is_read(self) -> bool:
        """Whether `state` is that after all of its tokens."""
        return self.position == self.length and self.before is None

    @property
    def kept(self) -> tuple[Sequence[int], State]:
        """The tokens that are read on the way to this one, and the state after them."""
        part = self.next_unread()
        return part.tokens[: part.position], part.state

    def next_unread(self) -> "Beginning":
        """The text to read next on the way to this one: itself, or a shorter one.

        It then goes on from where the one before it has ended.
        """
        part = self
        while part.before is not None and not part.before.is_read:
            part = part.before
        if part.before is not None:
            part.position, part.state = part.before.position, part.before.state
            part.before = None
        return part


class Row:
    """A request on its way: what it waits for, and the text that it has so far.

    Args:
        number: That of the request.
        request: What was asked.
        tokenizer: Turns tokens into text.

    Attributes:
        ends: Numbers of tokens of its prompt after which its state is kept, ascending.
        key: That of its next random numbers.
        seen: What its processors have seen, once it writes.
        beginning: All of its prompt but the last token, until it writes; `None`: nobody reads it yet.
        cached_tokens: How many tokens of the prompt were not read for this request.
        held: While its last tokens may be a stop string: the number of tokens before them, and by
            mixers the states after those; `None` for what can be shortened.
        num_kept: How many tokens of its prompt can be found while it is read and written.
        is_over: No event follows.
        has_failed: Its state is worth nothing.
    """

    def __init__(self, number: int, request: Request, tokenizer: Any):
        self.number = number
        self.request = request
        self.tokens = [int(token) for token in request.tokens]
        last = len(self.tokens) - 1
        self.ends = sorted({*(mark for mark in request.marks if mark < last), last})
        after = () if request.is_answer else self.tokens
        stop = request.stop if request.ending is None else request.ending()
        self.completion = Completion(tokenizer, stop, request.end, request.max_tokens, after)
        if request.seed is None:
            self.key = mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32)
        else:
            self.key = mx.random.key(request.seed % 2**64)
        self.seen: list[Any] = []
        self.beginning: Beginning | None = None
        self.cached_tokens = 0
        self.held: tuple[int, list[State | None]] | None = None
        self.num_kept = 0
        self.is_over = False
        self.has_failed = False

    @property
    def read(self) -> list[int]:
        """The tokens that the model has read, once the row writes."""
        return self.tokens + self.completion.tokens

    @property
    def unkept_ends(self) -> list[int]:
        """Those of `ends` that the model has read and that cannot be found yet."""
        count = len(self.tokens)
        if self.beginning is not None:
            count = self.beginning.next_unread().position
        return [end for end in self.ends if self.num_kept < end <= count]


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
            batch = self.by_stage.get(stage)
            if batch is None:
                state = joined_states(self._model, added)
                reader = Reader(self._model, state, self._known)
                self.by_stage[stage] = _Batch(reader, places)
                continue
            before = [batch.reader.state] if batch.places else []
            batch.reader.go_on(joined_states(self._model, [*before, *added]))
            batch.places += places

    def state_of(self, places: Sequence[int]) -> State:
        """That of rows which are read together, in the ordinary form."""
        [batch] = (batch for batch in self.by_stage.values() if places[0] in batch.places)
        if places == batch.places:
            return batch.reader.state
        rows = [batch.places.index(place) for place in places]
        longest = max(self._lengths[place] for place in places)
        return selected_rows(self._model, batch.reader.state, rows, longest)

    def before_last(self, place: int) -> list[State | None]:
        """By mixers, the state of one row before the last token that was read, where it was held."""
        [batch] = (batch for batch in self.by_stage.values() if place in batch.places)
        row = batch.places.index(place)
        return [
            None if state is None else tree_map(lambda array: array[row : row + 1], state)
            for state in batch.before
        ]

    def keep(self, places: Sequence[int]) -> None:
        """Drops all rows but these."""
        for batch in self.by_stage.values():
            self._drop(batch, set(batch.places) - set(places))
        new_places = {place: n for n, place in enumerate(places)}
        for batch in self.by_stage.values():
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
        batches = [batch for batch in self.by_stage.values() if batch.places]
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
        for stage, batch in list(self.by_stage.items()):
            moving = [place for place in batch.places if stages[place] != stage]
            states = {place: self.state_of([place]) for place in moving}
            self._drop(batch, moving)
            self.join(states)

    def _drop(self, batch: _Batch, places: Iterable[int]) -> None:
        left = [place for place in batch.places if place not in places]
        if not left:
            batch.reader.arrays = ()
        elif len(left) < len(batch.places):
            batch.reader.go_on(self.state_of(left))
        batch.places = left


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


@dataclass(frozen=True)
class Choice:
    """The tokens that the rows of a step chose, yet to be computed.

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


class Writing:
    """Rows that are written: while one step's tokens are handled, the next is computed.

    Args:
        model: Gives the logits.
        known: How many tokens have a text.
        keeps: Whether states of rows are to be kept.
    """

    def __init__(self, model: Decoder, known: int, keeps: bool = False):
        self._model = model
        self._is_on_cpu = mx.default_device() == mx.Device(mx.cpu)
        self._batches = Batches(model, known, keeps)
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
        """The model's state after the tokens of a row that it has read, for a batch of one."""
        return self._batches.state_of([self.rows.index(row)])

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
        read, state = row.read, self._batches.state_of([place])
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
        before = [batch.reader.arrays for batch in self._batches.by_stage.values()]
        logits, finite = self._batches.read(self._tokens)
        if self._is_on_cpu:
            # its memory is written to in place once nothing is to compute it any more
            mx.eval(before)
        del before
        state = [batch.reader.arrays for batch in self._batches.by_stage.values()]
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
                tokens = group.part_of(self._tokens)
                try:
                    group.seen = [
                        process.update(seen, tokens)
                        for process, seen in zip(group.processors, group.seen, strict=True)
                    ]
                except Exception as error:
                    group.error = error
