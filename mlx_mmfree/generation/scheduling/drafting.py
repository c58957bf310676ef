"""Drafts for a text that is alone: tokens are proposed, and the model reads several at a time."""

from abc import ABC, abstractmethod
from typing import Any, cast

import mlx.core as mx

from ...models import Decoder
from ..decode import DraftStats
from ..reader import prefill
from ..sampling import Draw, greedy
from ..speculative import NgramDecoding, RepeatedText, Speculation, SpeculativeDecoding
from .choices import drawn
from .rows import Row, State


class Drafting(ABC):
    """Writes one text with drafts while there is no other.

    Only texts without penalties and log-probabilities are written in this way: they stay what they are,
    whether another text comes or not.

    Args:
        model: Gives the logits.
        known: How many tokens have a text.
        num_draft_tokens: How many tokens are proposed at a time.
    """

    def __init__(self, model: Decoder, known: int, num_draft_tokens: int):
        self._model = model
        self._known = known
        self._count = num_draft_tokens
        self._before = DraftStats()
        self._decoding: Speculation | None = None
        self._followed: Row | None = None
        self._read = 0
        self._is_cut = False

    @property
    def stats(self) -> DraftStats:
        """The value of the drafts so far."""
        before, now = self._before, DraftStats() if self._decoding is None else self._decoding.stats
        return DraftStats(before.proposed + now.proposed, before.accepted + now.accepted)

    def catches_up(self, row: Row) -> bool:
        """Looks at a text that is written as usual; whether drafts for it may begin."""
        if row.request.top_logprobs is not None or not self._takes(row):
            return False
        if self._followed is not row:
            self._followed, self._read = row, 0
            self._follow(row)
        return self._is_ready(row)

    def begin(self, row: Row, state: State) -> None:
        """Goes on with a text for which drafts may begin.

        Args:
            row: The text.
            state: What the model has read of it: all but the last token.
        """
        options: dict[str, Any] = {
            "num_draft_tokens": self._count,
            "state": state,
            "known": self._known,
            "max_tokens": row.completion.remaining,
            "end": row.request.end,
        }
        self._decoding = self._decoding_of(row, options)
        self._followed = None
        self._is_cut = row.before_stop is not None

    def hold(self, row: Row) -> None:
        """Holds the states before what is, or may become, the stop string of the text."""
        count, was_cut, self._is_cut = len(row.read) - 1, self._is_cut, row.completion.is_cut
        # one begins with the last token, where no step has given several
        begins = not was_cut and (row.before_stop is None or count == row.before_stop[0] + 1)
        if begins or not self._is_cut:
            state = cast(Speculation, self._decoding).state
            pairs = zip(self._model.token_mixers, state, strict=True)
            row.before_stop = (
                count,
                [each if m.state_kind.is_renewed else None for m, each in pairs],
            )

    def step(self, row: Row) -> list[int]:
        """The next tokens of the text, one at least; it may end before the last of them.

        Raises:
            NumericalError: The logits of the model are not finite.
        """
        decoding = cast(Speculation, self._decoding)
        tokens = decoding.step()
        while decoding.num_ready:
            tokens += decoding.step()
        return tokens

    def end(self) -> State:
        """Lets go of the text; returns what the model has read of it, all but the last token."""
        state = cast(Speculation, self._decoding).state
        self._before = self.stats
        self._decoding = None
        return state

    @abstractmethod
    def _takes(self, row: Row) -> bool:
        """Returns whether drafts leave a text what it is."""

    @abstractmethod
    def _follow(self, row: Row) -> None:
        """Begins with a text of which nothing is known."""

    @abstractmethod
    def _is_ready(self, row: Row) -> bool:
        """Reads on, and tells whether drafts may begin."""

    @abstractmethod
    def _decoding_of(self, row: Row, options: dict[str, Any]) -> Speculation:
        """The drafts that go on with a text."""


class ModelDrafting(Drafting):
    """Lets a draft model propose.

    It reads the text in chunks, between the steps in which that is written as usual, and proposes tokens
    once it has caught up. Only greedy texts are written in this way.

    Args:
        model, known, num_draft_tokens: As for `Drafting`.
        draft_model: Proposes tokens.
        step_size: Tokens that it reads at a time.
    """

    def __init__(
        self,
        model: Decoder,
        known: int,
        num_draft_tokens: int,
        draft_model: Decoder,
        step_size: int,
    ):
        super().__init__(model, known, num_draft_tokens)
        self._draft_model = draft_model
        self._step_size = step_size
        self._state: State = None

    def _takes(self, row: Row) -> bool:
        return row.request.sampler is greedy

    def _follow(self, row: Row) -> None:
        self._state = self._draft_model.init_state(1)

    def _is_ready(self, row: Row) -> bool:
        unread = row.read[self._read : -1]
        if len(unread) <= self._step_size:
            return True
        self._read_on(unread[: self._step_size])
        return False

    def _decoding_of(self, row: Row, options: dict[str, Any]) -> Speculation:
        self._read_on(row.read[self._read : -1])
        state, self._state = self._state, None
        last = mx.array([row.read[-1:]], mx.int32)
        return SpeculativeDecoding(
            self._model, self._draft_model, last, draft_state=state, **options
        )

    def _read_on(self, tokens: list[int]) -> None:
        self._state = prefill(
            self._draft_model,
            mx.array([tokens], mx.int32).reshape(1, -1),
            self._state,
            step_size=self._step_size,
        )
        self._read += len(tokens)


class RowSampler:
    """Draws the tokens of one text with numbers of its own, as it does beside others.

    Args:
        sampler: Says how.
        key: The key of the next random numbers.

    Attributes:
        key: As above, after each token.
    """

    def __init__(self, sampler: Draw, key: mx.array):
        self._sampler = sampler
        self.key = key

    def __call__(self, logits: mx.array) -> mx.array:
        keys, chosen = drawn(self._sampler, logits, self.key[None])
        self.key = keys[0]
        return chosen


class NgramDrafting(Drafting):
    """Proposes what followed the same tokens earlier in the text, once they come again."""

    def __init__(self, model: Decoder, known: int, num_draft_tokens: int):
        super().__init__(model, known, num_draft_tokens)
        self._text = RepeatedText()
        self._drawn: tuple[Row, RowSampler] | None = None

    def end(self) -> State:
        if self._drawn is not None:
            row, sampler = self._drawn
            row.key = sampler.key
        return super().end()

    def _takes(self, row: Row) -> bool:
        return row.request.sampler is greedy or isinstance(row.request.sampler, Draw)

    def _follow(self, row: Row) -> None:
        self._text = RepeatedText()

    def _is_ready(self, row: Row) -> bool:
        read = row.read
        self._text.add(read[self._read :])
        self._read = len(read)
        return bool(self._text.following(1))

    def _decoding_of(self, row: Row, options: dict[str, Any]) -> Speculation:
        self._text.add(row.read[self._read :])
        sampler = row.request.sampler
        self._drawn = None
        if isinstance(sampler, Draw):
            sampler = RowSampler(sampler, row.key)
            self._drawn = row, sampler
        last = mx.array([row.read[-1:]], mx.int32)
        return NgramDecoding(self._model, last, self._text, sampler=sampler, **options)
