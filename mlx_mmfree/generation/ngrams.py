"""Drafts from the text itself (prompt lookup): what followed the last tokens where they stood before.

No second model is needed. It helps where a text repeats what was read or written: edits, code, quotes.
"""

from collections.abc import Collection, Sequence
from math import inf
from typing import Any, Protocol

import mlx.core as mx

from ..models import Decoder
from ..ops.backend.compilation import random_key, set_random_key
from .decode import PREFILL_STEP_SIZE, Progress, prefill
from .sampling import LogitsProcessor, Sampler, greedy
from .speculative import (
    NUM_DRAFT_TOKENS,
    RewindingReader,
    Speculation,
    accept_chosen,
    check_num_draft_tokens,
)

_SIZE = 4
_MOST_WASTED, _FREE_WASTE = 0.03, 3
_WORTHWHILE, _SURE = 2 / 3, 12


class RepeatedText:
    """Tokens that were read, and where each run of four of them stood last.

    Args:
        tokens: The first tokens.

    Attributes:
        foreseen: How many of the last tokens, one after the other, were those that followed before.

    Example:
        >>> text = RepeatedText([1, 2, 3, 4, 5, 6, 1, 2, 3, 4])
        >>> text.following(1)
        [5]
        >>> text.add([5])
        >>> text.following(3)
        [6, 1, 2]
    """

    def __init__(self, tokens: Sequence[int] = ()):
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}
        self._place = 0
        self.foreseen = 0
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Goes on with tokens."""
        known = self._tokens
        for token in tokens:
            place = self._next_place()
            if place is None or known[place] != token:
                self.foreseen = 0
            else:
                self.foreseen += 1
                self._place = place + 1
            # a run is known once a token has followed it
            if len(known) >= _SIZE:
                self._places[self._run()] = len(known)
            known.append(token)

    def following(self, count: int) -> list[int]:
        """The tokens that follow, so many at most, if they are those that followed before."""
        place = self._next_place()
        return [] if place is None else self._tokens[place : place + count]

    def _next_place(self) -> int | None:
        """Where the next token stood before."""
        return self._place if self.foreseen else self._places.get(self._run())

    def _run(self) -> tuple[int, ...]:
        return tuple(self._tokens[-_SIZE:])


class KeyedSampler(Protocol):
    """Chooses tokens with numbers that a key gives, which is set back for tokens that are refused."""

    key: mx.array

    def __call__(self, logits: mx.array) -> mx.array:
        """Token ids `(B,)` for logits `(B, V)`."""


class GlobalSampler:
    """A sampler that draws from MLX's generator, if it draws at all.

    Args:
        sampler: Chooses tokens.
    """

    def __init__(self, sampler: Sampler):
        self._sampler = sampler

    @property
    def key(self) -> mx.array:
        """That of the generator's next numbers, as a copy."""
        return random_key()

    @key.setter
    def key(self, key: mx.array) -> None:
        set_random_key(key)

    def __call__(self, logits: mx.array) -> mx.array:
        return self._sampler(logits)


class NgramDecoding(Speculation):
    """One text in the middle of decoding with drafts from the text itself; steps as `Decoding` does.

    The tokens are those that `Decoding` gives, sampled ones too: the sampler is called once for each
    token, with the random numbers that it would have there.

    Where the last four tokens stood before, the token that followed is proposed, and more of them once
    it was right. Unless two thirds of the proposals are kept, or twelve tokens in a row were foreseen,
    the refused ones are at most 3 % of the rows that the model computes, or three.

    Args:
        model: Gives the logits.
        tokens: The prompt, integers `(1, L)`.
        text: All that may be repeated, the prompt at its end; it takes the new tokens in.
        num_draft_tokens: How many tokens are proposed at a time, at most.
        state: What the model has read before the prompt.
        sampler: Chooses tokens from logits; one with a `key` draws with its own numbers.
        processors: Change the logits before.
        prefill_step_size: Positions of the prompt read at a time.
        progress: Called as the prompt is read.
        max_tokens, end: As for `Speculation`.

    Raises:
        ValueError: A number is too small.
    """

    def __init__(
        self,
        model: Decoder,
        tokens: mx.array,
        text: RepeatedText,
        *,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        state: Any = None,
        sampler: Sampler | KeyedSampler = greedy,
        processors: Sequence[LogitsProcessor] = (),
        prefill_step_size: int = PREFILL_STEP_SIZE,
        progress: Progress | None = None,
        max_tokens: float = inf,
        end: Collection[int] = (),
    ):
        check_num_draft_tokens(num_draft_tokens)
        state = prefill(
            model, tokens[:, :-1], state, step_size=prefill_step_size, progress=progress
        )
        super().__init__(
            RewindingReader(model, state, num_draft_tokens),
            tokens,
            model.vocab_size,
            num_draft_tokens=num_draft_tokens,
            sampler=sampler,
            processors=processors,
            max_tokens=max_tokens,
            end=end,
        )
        self._text = text
        self._rows = 0
        self._draws = sampler if hasattr(sampler, "key") else GlobalSampler(sampler)
        self._keys: list[mx.array] = []

    def _propose(self, most: int) -> tuple[list[mx.array], list[Any]]:
        found = self._text.following(most if self._text.foreseen else min(most, 1))
        if not self._may_propose(len(found)):
            found = []
        drafts = [mx.array([token], mx.int32) for token in found]
        seen = [self._seen]
        for draft in drafts:
            seen.append(self._update(seen[-1], draft))
        return drafts, seen

    def _may_propose(self, count: int) -> bool:
        """Whether so many proposals would be worth it though all of them were refused."""
        proposed, accepted = self.stats.proposed + count, self.stats.accepted
        rows = self._rows + count + 1
        is_little = proposed - accepted <= max(_FREE_WASTE, _MOST_WASTED * rows)
        is_likely = self._text.foreseen >= _SURE or accepted >= _WORTHWHILE * proposed
        return is_little or is_likely

    def _accept(self, logits: mx.array, drafts: list[mx.array]) -> tuple[mx.array, mx.array]:
        chosen = []
        self._keys = []
        for row in range(logits.shape[0]):
            chosen.append(self._draws(logits[row : row + 1]))
            self._keys.append(self._draws.key)
        return accept_chosen(mx.concatenate(chosen), drafts)

    def _settle(self, accepted: int, proposed: list[int]) -> None:
        # as if nothing had been drawn for what was refused
        self._draws.key = self._keys[accepted]
        self._rows += 1 + len(proposed)
        self._text.add([*proposed[:accepted], self._last])
