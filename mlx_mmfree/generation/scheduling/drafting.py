"""A text that is written alone, with a draft model."""

from typing import Any, cast

import mlx.core as mx

from ...models import Decoder
from ..decode import prefill
from ..samplers import greedy
from ..speculative import DraftStats, SpeculativeDecoding
from .row import Row

State = Any


class Drafting:
    """Writes one text with a draft model while there is no other.

    The draft model reads the text in chunks, between the steps in which it is written as usual, and
    proposes tokens once it has caught up. Only greedy texts without penalties and log-probabilities are
    written in this way: they stay what they are, whether another text comes or not.

    Args:
        model: Gives the logits.
        draft_model: Proposes tokens.
        num_draft_tokens: How many it proposes at a time.
        step_size: Tokens that it reads at a time.

    Attributes:
        row: The text that is written so; `None`: none is.
    """

    def __init__(self, model: Decoder, draft_model: Decoder, num_draft_tokens: int, step_size: int):
        self._model = model
        self._draft_model = draft_model
        self._count = num_draft_tokens
        self._step_size = step_size
        self._before = DraftStats()
        self._decoding: SpeculativeDecoding | None = None
        self._followed: Row | None = None
        self._read = 0
        self._state: State = None
        self.row: Row | None = None

    @property
    def stats(self) -> DraftStats:
        """What the draft model was worth so far."""
        before, now = self._before, DraftStats() if self._decoding is None else self._decoding.stats
        return DraftStats(before.proposed + now.proposed, before.accepted + now.accepted)

    def catches_up(self, row: Row) -> bool:
        """Reads a chunk of a text that is written as usual; whether one more would be all of it."""
        if row.request.sampler is not greedy or row.request.top_logprobs is not None:
            return False
        if self._followed is not row:
            self._followed, self._read = row, 0
            self._state = self._draft_model.init_state(1)
        unread = row.read[self._read : -1]
        if len(unread) <= self._step_size:
            return True
        self._read_on(unread[: self._step_size])
        return False

    def begin(self, row: Row, state: State) -> None:
        """Goes on with a text that the draft model has caught up with.

        Args:
            row: The text.
            state: What the model has read of it: all but the last token.
        """
        self._read_on(row.read[self._read : -1])
        self._decoding = SpeculativeDecoding(
            self._model,
            self._draft_model,
            mx.array([row.read[-1:]], mx.int32),
            num_draft_tokens=self._count,
            state=state,
            draft_state=self._state,
            processors=row.request.processors,
        )
        self.row, self._followed, self._state = row, None, None

    def step(self) -> list[int]:
        """The next tokens, one at least; the text may end before the last of them.

        Raises:
            NumericalError: The logits of the model are not finite.
        """
        decoding = cast(SpeculativeDecoding, self._decoding)
        tokens = decoding.step(is_last=cast(Row, self.row).completion.remaining == 1)
        while decoding.num_ready:
            tokens += decoding.step()
        return tokens

    def end(self) -> State:
        """Lets go of the text; returns what the model has read of it, all but the last token."""
        state = cast(SpeculativeDecoding, self._decoding).state
        self._before = self.stats
        self.row = self._decoding = None
        return state

    def _read_on(self, tokens: list[int]) -> None:
        self._state = prefill(
            self._draft_model,
            mx.array([tokens], mx.int32).reshape(1, -1),
            self._state,
            step_size=self._step_size,
        )
        self._read += len(tokens)
