"""Continuous batching: requests join and leave between steps, and prompts are read a chunk at a time."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple, cast

import mlx.core as mx

from ...errors import MMFreeError
from ...models import Decoder, check_causal
from ...models.parts.token_checks import check_tokens
from ..decode import DraftStats, check_max_tokens
from ..finite_logits import not_finite
from ..sessions import Sessions
from ..speculative import NUM_DRAFT_TOKENS, check_draft, check_one_kind_of_draft
from ..states import state_before
from .choices import Choice
from .drafting import Drafting, ModelDrafting, NgramDrafting
from .prompt_reading import PromptReading
from .requests import Event, Request, TokenLogprobs
from .rows import Row, State
from .writing import Writing

PREFILL_STEP_SIZE = 512

MAX_ROWS = 32

_MOST_PENDING = 4
"""The most states that wait until nothing is written: of a prompt, its breakpoints, and its text."""


class _Pending(NamedTuple):
    """A state that is still to be stored.

    Attributes:
        tokens: The text that it is of.
        state: What the model keeps of it.
        ends: Numbers of tokens of prefixes that it serves too.
    """

    tokens: Sequence[int]
    state: State
    ends: Sequence[int] = ()


class Scheduler:
    """Continues many texts at once; but for rounding, each is the one that its request would get alone.

    A step reads at most one chunk of prompts and one token of each text that is being written, so that
    a text never waits longer than one chunk. Requests get a row in the order in which they came.
    Prompts then take turns, a chunk each, and what they have in common with the prompt of
    another request, up to a breakpoint or the end, is read once.

    All calls come from one thread. A failure of one request ends it alone.

    Args:
        model: Gives the logits.
        tokenizer: Belongs to the model.
        max_rows: How many requests are read or written at a time; the others wait.
        prefill_step_size: Positions of prompts read at a step.
        sessions: Where states are found and stored: at the end of a prompt, at its breakpoints, and
            after the text without its end token or stop string; `None`: nothing is stored.
        draft_model: A smaller model with the same tokens, which proposes tokens of a greedy text while
            there is no other one.
        ngram_drafts: Propose what followed the same tokens earlier in a text, while there is no other
            one and no penalty; without a draft model.
        num_draft_tokens: How many tokens are proposed at a time.

    Raises:
        UnsupportedModelError: The model cannot continue a text.
        ValueError: A number is too small, the draft model has another vocabulary, or both kinds of
            drafts are asked for.

    Example:
        >>> scheduler = Scheduler(model, tokenizer)  # doctest: +SKIP
        >>> number = scheduler.submit(Request(tokenizer.encode("Once upon a time")))  # doctest: +SKIP
        >>> while scheduler.has_work:  # doctest: +SKIP
        ...     for event in scheduler.step():
        ...         print(event.text, end="")
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Any,
        *,
        max_rows: int = MAX_ROWS,
        prefill_step_size: int = PREFILL_STEP_SIZE,
        sessions: Sessions | None = None,
        draft_model: Decoder | None = None,
        ngram_drafts: bool = False,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
    ):
        check_causal(model)
        check_one_kind_of_draft(draft_model, ngram_drafts)
        for name, value in (
            ("max_rows", max_rows),
            ("prefill_step_size", prefill_step_size),
            ("num_draft_tokens", num_draft_tokens),
        ):
            if value < 1:
                raise ValueError(f"[scheduler] '{name}' must be at least 1 but got {value}.")
        self._drafting: Drafting | None = None
        if draft_model is not None:
            check_causal(draft_model)
            check_draft(model, draft_model)
            self._drafting = ModelDrafting(
                model, tokenizer.vocab_size, num_draft_tokens, draft_model, prefill_step_size
            )
        elif ngram_drafts:
            self._drafting = NgramDrafting(model, tokenizer.vocab_size, num_draft_tokens)
        self._model = model
        self._tokenizer = tokenizer
        self._max_rows = max_rows
        self._sessions = sessions
        self._count = 0
        self._waiting: deque[Row] = deque()
        self._reading = PromptReading(model, prefill_step_size, sessions)
        self._writing = Writing(model, tokenizer.vocab_size, keeps=sessions is not None)
        self._choice: Choice | None = None
        # the text that is written with drafts
        self._drafted: Row | None = None
        # those that are not over, by their numbers
        self._rows: dict[int, Row] = {}
        self._has_cancelled = False
        self._failed: list[Event] = []
        self._pending: deque[_Pending] = deque()

    @property
    def has_work(self) -> bool:
        """True if a request is not over yet."""
        return bool(
            self._waiting
            or self._reading.rows
            or self._writing.rows
            or self._drafted
            or self._choice
            or self._failed
            or self._pending
        )

    @property
    def draft_stats(self) -> DraftStats:
        """The value of the drafts so far."""
        return DraftStats() if self._drafting is None else self._drafting.stats

    @property
    def tokens_read(self) -> int:
        """How many tokens of prompts were read so far; those that were known are not read."""
        return self._reading.tokens_read

    def submit(self, request: Request) -> int:
        """Takes a request in and returns its number, by which its events are known.

        Raises:
            ValueError: The prompt is empty, too long or has a token outside the vocabulary, or a number
                is out of its bounds.
        """
        longest, vocab_size = self._model.max_length, self._model.vocab_size
        size = len(request.tokens)
        if size == 0:
            raise ValueError("[scheduler] 'prompt' must not be empty. Give at least one token.")
        check_tokens(request.tokens, vocab_size)
        if longest is not None and size > longest:
            raise ValueError(
                f"[scheduler] 'prompt' must have at most {longest} tokens for this model but has "
                f"{size}."
            )
        check_max_tokens(request.max_tokens)
        if request.top_logprobs is not None and not 0 <= request.top_logprobs <= vocab_size:
            raise ValueError(
                f"[scheduler] 'top_logprobs' must be between 0 and {vocab_size}, the vocabulary, but "
                f"got {request.top_logprobs}."
            )
        for breakpoint in request.breakpoints:
            if not 0 < breakpoint <= size:
                raise ValueError(
                    f"[scheduler] 'breakpoints' must lie between 1 and {size}, the number of tokens, "
                    f"but hold {breakpoint}."
                )
        self._count += 1
        # the last token is not read
        capacity = inf if longest is None else longest - size + 1
        request = replace(request, max_tokens=int(min(request.max_tokens, capacity)))
        row = Row(self._count, request, self._tokenizer)
        self._rows[row.number] = row
        self._waiting.append(row)
        return row.number

    def cancel(self, request: int) -> None:
        """Ends a request; its row is free at the next step, and no event of it follows."""
        row = self._rows.pop(request, None)
        if row is not None:
            row.is_over = self._has_cancelled = True

    def close(self) -> None:
        """Keeps what texts that are over have left to keep, where no step follows."""
        self._drop_cancelled()
        self._keep(len(self._pending))

    def step(self) -> list[Event]:
        """Reads on, and returns what has become of the requests.

        A request has one event at most, unless more tokens were proposed and kept.
        """
        if self._has_cancelled:
            self._drop_cancelled()
        if self._drafted is not None and self._waiting and self._max_rows > 1:
            self._end_drafts()
        self._admit()
        self._reading.read()
        self._failed += [self._event(row, error=error) for row, error in self._reading.failed]
        if self._reading.ends:
            mx.eval([state for _, state in self._reading.ends])
            self._pending += [_Pending(*end) for end in self._reading.ends]
        if self._drafted is not None and self._reading.rows:
            self._end_drafts()
        self._join()
        choice, self._choice = self._choice, self._writing.step() if self._writing.rows else None
        if self._pending:
            # where no token waits for it: while several rows are computed, or none is; then it is one
            # at a time, so that a request need not wait for more
            count = len(self._pending)
            if len(self._writing.rows) < 2:
                is_idle = choice is None and self._choice is None
                count = max(count - _MOST_PENDING, int(is_idle))
            self._keep(count)
        events, self._failed = self._failed, []
        if choice is not None:
            events += self._events_of(choice)
        if self._sessions is not None:
            self._writing.hold()
        # of one that may have a single token more, that one is chosen, and none is to be read
        rows = self._writing.rows
        if over := [row for row in rows if row.is_over or row.completion.remaining <= 1]:
            self._retire(over)
        if self._drafted is not None:
            events += self._draft(self._drafted)
        elif self._drafting is not None:
            events += self._begin_to_draft(self._drafting)
        return events

    def _drop_cancelled(self) -> None:
        self._has_cancelled = False
        self._waiting = deque(row for row in self._waiting if not row.is_over)
        if self._sessions is not None and self._sessions.serves_all:
            self._pending += [
                _Pending(*row.prefix.computed, ends)
                for row in self._reading.rows
                if row.is_over and row.prefix is not None and (ends := row.unstored_ends)
            ]
        self._reading.drop_over()
        self._retire([row for row in self._writing.rows if row.is_over])
        if self._drafted is not None and self._drafted.is_over:
            self._let_go(self._drafted)

    def _admit(self) -> None:
        """Gives free rows to the requests that came first."""
        drafted = self._drafted is not None
        while (
            self._waiting
            and len(self._reading.rows) + len(self._writing.rows) + drafted < self._max_rows
        ):
            row = self._waiting.popleft()
            if self._sessions and (self._pending or self._reading.rows or self._writing.rows):
                self._keep_prefixes(row, self._sessions)
            self._reading.add(row)
            for other in self._waiting:
                if other.tokens == row.tokens:
                    # holds what is read until the other has a row
                    other.prefix = row.prefix

    def _join(self) -> None:
        """Lets rows write whose prompts are read."""
        rows, states = [], []
        for row in list(self._reading.rows):
            prefix = row.prefix
            assert prefix is not None
            if not prefix.is_read:
                continue
            self._reading.rows.remove(row)
            row.prefix = None
            prompt = mx.array([row.tokens], mx.int32)
            try:
                row.seen = [
                    process.start(prompt, None, self._model.vocab_size)
                    for process in row.request.processors
                ]
            except Exception as error:
                self._failed.append(self._event(row, error=error))
                continue
            rows.append(row)
            known = prefix.state
            states.append(self._model.init_state(1) if known is None else known)
        if rows:
            self._writing.join(rows, states)

    def _events_of(self, choice: Choice) -> list[Event]:
        """The events of a step; waits until its tokens are computed."""
        events = []
        tokens, finite = (cast(list, array.tolist()) for array in (choice.tokens, choice.finite))
        logprobs = {} if choice.logprobs is None else choice.logprobs.rows()
        for n, row in enumerate(choice.rows):
            if row.is_over:
                continue
            error = choice.failures.get(n) or (None if finite[n] else not_finite())
            if error is None:
                events.append(self._event(row, tokens[n], logprobs.get(n)))
            else:
                events.append(self._event(row, error=error))
        return events

    def _event(
        self,
        row: Row,
        token: int | None = None,
        logprobs: TokenLogprobs | None = None,
        error: Exception | None = None,
    ) -> Event:
        """The result of a row's step: the token that it has chosen, or the error that ends it."""
        completion = row.completion
        text = "" if token is None else completion.add(token)
        if error is not None or completion.finish_reason is not None:
            row.is_over, row.has_failed = True, error is not None
            del self._rows[row.number]
        return Event(
            request=row.number,
            text=text,
            token=token,
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            prompt_tokens=len(row.tokens),
            cached_tokens=row.cached_tokens,
            error=error,
            stop_string=completion.stop_string,
        )

    def _retire(self, rows: Collection[Row]) -> None:
        if self._sessions is not None:
            healthy = [row for row in rows if not row.has_failed]
            pending = [
                _Pending(*pending, row.ends)
                for row in healthy
                for pending in self._writing.reusable(row)
            ]
            # before the tokens that others read next
            mx.async_eval([each.state for each in pending])
            self._pending += pending
        self._writing.drop(rows)

    def _begin_to_draft(self, drafting: Drafting) -> list[Event]:
        """Begins to write a text with drafts that is alone, once there are some."""
        rows, choice = self._writing.rows, self._choice
        if len(rows) != 1 or self._waiting or self._reading.rows or choice is None:
            return []
        (row,) = rows
        if row.request.processors or not drafting.catches_up(row):
            return []
        self._choice = None
        events = self._events_of(choice)
        state = self._writing.state_of(row)
        row.key = self._writing.key_of(row)
        self._writing.drop([row])
        if not row.is_over:
            drafting.begin(row, state)
            self._drafted = row
        elif not row.has_failed and self._sessions is not None:
            self._pending.append(_Pending(row.read[:-1], state, row.ends))
        return events

    def _end_drafts(self) -> None:
        """Lets the text that is written with drafts be written with others."""
        row, self._drafted = cast(Row, self._drafted), None
        read, state, sessions = row.read[:-1], cast(Drafting, self._drafting).end(), self._sessions
        if sessions is not None and sessions.serves_all:
            ends = row.unstored_ends
            if any(_share(other.tokens, row.tokens, ends) for other in self._waiting):
                sessions.keep(read, state, ends)
                row.num_stored = ends[-1]
        self._writing.join([row], [state])

    def _draft(self, row: Row) -> list[Event]:
        """The next tokens of a text that is written with drafts."""
        events: list[Event] = []
        drafting = cast(Drafting, self._drafting)
        if self._sessions is not None:
            drafting.hold(row)
        try:
            tokens = drafting.step(row)
        except MMFreeError as error:
            events.append(self._event(row, error=error))
            tokens = []
        while tokens and not row.is_over:
            events.append(self._event(row, tokens.pop(0)))
        if row.is_over:
            self._let_go(row, len(tokens))
        return events

    def _let_go(self, row: Row, ahead: int = 0) -> None:
        """Takes a text back that is over; the model may have read tokens that are none of it."""
        self._drafted = None
        read, state = row.read[:-1], cast(Drafting, self._drafting).end()
        if self._sessions is None or row.has_failed:
            return
        length = len(read) + ahead
        whole = state_before(self._model, state, length, ahead) if ahead else state
        found = [] if row.completion.stop_string else [(read, whole)]
        if row.before_stop is not None and (row.completion.is_cut or whole is None):
            count, states = row.before_stop
            before = state_before(self._model, state, length, length - count, states)
            found.insert(0, (read[:count], before))
        self._pending += [
            _Pending(tokens, each, row.ends) for tokens, each in found if each is not None
        ]

    def _keep_prefixes(self, row: Row, sessions: Sessions) -> None:
        """Keeps what a text goes on from, of texts that are over, read or written."""
        for _ in range(len(self._pending)):
            tokens, _, ends = self._pending[0]
            served = [*ends, len(tokens)] if sessions.serves_all else [len(tokens)]
            if _share(row.tokens, tokens, served):
                self._keep(1)
            else:
                self._pending.rotate(-1)
        for other in [*self._reading.rows, *self._writing.rows] if sessions.serves_all else []:
            ends, part = other.unstored_ends, other.prefix
            if _share(row.tokens, other.tokens, ends):
                for each in [part.computed] if part is not None else self._writing.reusable(other):
                    sessions.keep(*each, ends)
                other.num_stored = ends[-1]

    def _keep(self, count: int) -> None:
        """Keeps the states that have waited for longest."""
        for _ in range(count):
            cast(Sessions, self._sessions).keep(*self._pending.popleft())


def _share(text: Sequence[int], other: Sequence[int], ends: Sequence[int]) -> bool:
    """Returns whether a text begins with a prefix of another that ends at one of `ends`."""
    return any(0 < end < len(text) and text[:end] == other[:end] for end in ends)
