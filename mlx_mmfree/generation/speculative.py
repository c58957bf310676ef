"""Speculative decoding (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

A small draft model proposes tokens one by one; the model reads them all at once and keeps those that
it would have chosen itself.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

from ..models import Decoder
from ..ops import log_softmax
from .decode import PREFILL_STEP_SIZE, Progress, prefill
from .finite import are_finite, check_finite
from .key_values import can_rewind, rewound
from .penalties import LogitsProcessor
from .samplers import Draw, Sampler, greedy

NUM_DRAFT_TOKENS = 3


@dataclass(frozen=True)
class DraftStats:
    """What a draft model was worth.

    Attributes:
        proposed: Tokens that it proposed.
        accepted: Those that the model kept.
    """

    proposed: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """The share that was kept; 0 where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0


def check_draft(model: Decoder, draft_model: Decoder) -> None:
    """Refuses a draft model whose logits are not about the same tokens.

    Raises:
        ValueError: The vocabularies differ in size.
    """
    if draft_model.vocab_size != model.vocab_size:
        raise ValueError(
            f"[speculative] 'draft_model' must have the model's vocabulary of {model.vocab_size} "
            f"tokens but has {draft_model.vocab_size}. Choose a smaller model of the same family."
        )


def check_draft_tokenizer(tokenizer: Any, draft_tokenizer: Any) -> None:
    """Refuses a draft model whose tokens have other texts.

    Raises:
        ValueError: The tokenizers differ.
    """
    count = tokenizer.vocab_size
    if draft_tokenizer.vocab_size == count:
        pieces, drafted = (
            [_piece(given, n) for n in range(count)] for given in (tokenizer, draft_tokenizer)
        )
        different = next((n for n in range(count) if pieces[n] != drafted[n]), None)
        if different is None:
            return
        found = f"token {different} is {drafted[different]!r:.40}, not {pieces[different]!r:.40}"
    else:
        found = f"it has {draft_tokenizer.vocab_size} tokens, not {count}"
    raise ValueError(
        f"[speculative] 'draft_model' must come with the tokenizer of the model but {found}. Choose "
        "a smaller model of the same family."
    )


def _piece(tokenizer: Any, token: int) -> str | None:
    try:
        return str(tokenizer.piece(token))
    except ValueError:
        return None


class _Reader:
    """A model, what it has read, and the tokens that it is yet to read."""

    def __init__(self, model: Decoder, state: Any, pending: list[int]):
        self.model = model
        self.state = state
        self.pending = pending

    def read(self, tokens: mx.array, outputs: int) -> mx.array:
        """The logits `(outputs, V)` behind the last of the tokens `(1, L)`."""
        hidden, self.state = self.model.hidden(tokens, self.state)
        return self.model.logits(hidden[:, -outputs:])[0].astype(mx.float32)


class SpeculativeDecoding:
    """One text in the middle of decoding with a draft model; steps as `Decoding` does.

    Where the sampler is a `Draw`, with p the model's probabilities and q the draft's, a proposed
    token x is kept with probability :math:`\\min(1, p(x) / q(x))`; the first one that is not is drawn
    again from :math:`\\max(p - q, 0)`, so that every token is distributed as without a draft. Any
    other sampler, greedy included, chooses from the model's logits, and proposed tokens are kept as
    long as they are its choices.

    A state that attention can shorten is shortened by the tokens that were refused. Any other is
    kept as it was before the proposal, and the tokens that were kept are read again, with the next
    proposal as long as they are few.

    Args:
        model: Gives the logits.
        draft_model: Proposes tokens; has the same vocabulary.
        tokens: The prompt, integers `(1, L)`.
        num_draft_tokens: How many tokens are proposed at a time.
        state: What the model has read before the prompt. The draft model has not.
        sampler: Chooses tokens from logits, of both models.
        processors: Change the logits before, of both models.
        prefill_step_size: Positions of the prompt read at a time.
        progress: Called as each model reads the prompt.

    Raises:
        ValueError: The vocabularies differ or a number is too small.
    """

    def __init__(
        self,
        model: Decoder,
        draft_model: Decoder,
        tokens: mx.array,
        *,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        state: Any = None,
        sampler: Sampler = greedy,
        processors: Sequence[LogitsProcessor] = (),
        prefill_step_size: int = PREFILL_STEP_SIZE,
        progress: Progress | None = None,
    ):
        check_draft(model, draft_model)
        if num_draft_tokens < 1:
            raise ValueError(
                f"[speculative] 'num_draft_tokens' must be at least 1 but got {num_draft_tokens}."
            )
        self._count = num_draft_tokens
        self._sampler = sampler
        self._processors = processors
        last = [int(tokens[0, -1])]
        self._target, self._draft = (
            _Reader(
                reader,
                prefill(
                    reader,
                    tokens[:, :-1],
                    before,
                    step_size=prefill_step_size,
                    progress=progress,
                ),
                list(last),
            )
            for reader, before in (
                (model, model.init_state(1) if state is None else state),
                (draft_model, draft_model.init_state(1)),
            )
        )
        self._seen: Any = [p.start(tokens, None, model.vocab_size) for p in processors]
        self._ready: deque[tuple[int, bool]] = deque()
        self.stats = DraftStats()
        self.from_draft = False

    def step(self, *, is_last: bool = False) -> list[int]:
        """The next token, as a batch of one.

        Args:
            is_last: No step follows, so nothing is proposed.
        """
        if not self._ready:
            self._ready.extend(self._round(0 if is_last else self._count))
        token, self.from_draft = self._ready.popleft()
        return [token]

    def _round(self, count: int) -> list[tuple[int, bool]]:
        """Proposes tokens and gives those that were kept and the one that follows them."""
        drafts, scores, seen, states = self._propose(count)
        target = self._target
        tokens = mx.concatenate([mx.array(target.pending, mx.int32), *drafts])[None]
        is_shortened = can_rewind(target.model, target.state, tokens.shape[1])
        before = None if is_shortened else target.state
        logits = target.read(tokens, count + 1)
        finite = are_finite(logits)
        # the positions are rows of a batch
        rows = tree_map(lambda *arrays: mx.concatenate(list(arrays)), *seen)
        logits = self._process(logits, rows)
        if isinstance(self._sampler, Draw):
            kept, new = _accept_drawn(self._sampler.scores(logits), scores, drafts)
        else:
            kept, new = _accept_chosen(self._sampler(logits), drafts)
        numbers = cast(list[int], mx.concatenate([kept, new, *drafts]).tolist())
        check_finite(cast(bool, finite.item()))
        accepted, token, proposed = numbers[0], numbers[1], numbers[2:]
        fresh = [*proposed[:accepted], token]
        self._settle(count - accepted, fresh, before)
        self._settle_draft(accepted, proposed, token, states)
        self._seen = self._update(seen[accepted], new)
        mx.eval(target.state, self._draft.state, self._seen)
        self.stats = DraftStats(self.stats.proposed + count, self.stats.accepted + accepted)
        return [(number, n < accepted) for n, number in enumerate(fresh)]

    def _propose(self, count: int) -> tuple[list[mx.array], list[mx.array], list[Any], list[Any]]:
        """Tokens `(1,)`, their scores `(1, V)`, the penalties before each and after the last, and
        the draft's states, all or only the last if it can be shortened."""
        draft, seen = self._draft, [self._seen]
        drafts: list[mx.array] = []
        scores: list[mx.array] = []
        states: list[Any] = []
        tokens = mx.array(draft.pending, mx.int32)[None]
        keeps_all = not can_rewind(draft.model, draft.state, tokens.shape[1] + count)
        for _ in range(count):
            logits = self._process(draft.read(tokens, 1), seen[-1])
            if isinstance(self._sampler, Draw):
                scores.append(self._sampler.scores(logits))
                chosen = mx.random.categorical(scores[-1])
            else:
                chosen = self._sampler(logits)
            chosen = chosen.astype(mx.int32)
            states = [*states, draft.state] if keeps_all else [draft.state]
            seen.append(self._update(seen[-1], chosen))
            drafts.append(chosen)
            tokens = chosen[None]
        return drafts, scores, seen, states

    def _settle(self, refused: int, fresh: list[int], before: Any) -> None:
        """Takes the refused tokens back from the model's state."""
        target = self._target
        if not refused or before is None:
            if refused:
                target.state = rewound(target.model, target.state, refused)
            target.pending = fresh[-1:]
            return
        target.state, target.pending = before, target.pending + fresh
        if len(target.pending) > self._count + 1:
            again = mx.array(target.pending[:-1], mx.int32)[None]
            target.state = prefill(target.model, again, before)
            target.pending = target.pending[-1:]

    def _settle_draft(
        self, accepted: int, proposed: list[int], token: int, states: list[Any]
    ) -> None:
        """The draft has not read its last token."""
        draft, count = self._draft, len(proposed)
        if not count:
            draft.pending = [*draft.pending, token]
            return
        read = min(accepted, count - 1)
        if len(states) == count:
            draft.state = states[read]
        else:
            draft.state = rewound(draft.model, draft.state, count - 1 - read)
        draft.pending = [*proposed[read:accepted], token]

    def _process(self, logits: mx.array, seen: Any) -> mx.array:
        for process, state in zip(self._processors, seen, strict=True):
            logits = process(logits, state)
        return logits

    def _update(self, seen: Any, tokens: mx.array) -> Any:
        return [
            process.update(state, tokens)
            for process, state in zip(self._processors, seen, strict=True)
        ]


def _accept_chosen(chosen: mx.array, drafts: list[mx.array]) -> tuple[mx.array, mx.array]:
    """How many tokens are the choices themselves `(1,)`, and the choice behind them `(1,)`."""
    chosen = chosen.astype(mx.int32)
    if not drafts:
        return mx.zeros((1,), mx.int32), chosen
    is_same = (mx.concatenate(drafts) == chosen[:-1]).astype(mx.int32)
    kept = mx.cumprod(is_same).sum(keepdims=True)
    return kept, chosen[kept]


def _accept_drawn(
    scores: mx.array, draft_scores: list[mx.array], drafts: list[mx.array]
) -> tuple[mx.array, mx.array]:
    """How many tokens are kept `(1,)`, and a token drawn from what they leave over `(1,)`."""
    p = mx.exp(log_softmax(scores))
    # nothing was proposed behind the last token
    q = mx.concatenate([*(mx.exp(log_softmax(row)) for row in draft_scores), mx.zeros_like(p[:1])])
    kept = mx.zeros((1,), mx.int32)
    if drafts:
        at = mx.concatenate(drafts)[:, None]
        p_at, q_at = (mx.take_along_axis(x[:-1], at, axis=-1)[:, 0] for x in (p, q))
        is_kept = mx.random.uniform(shape=p_at.shape) * q_at < p_at
        kept = mx.cumprod(is_kept.astype(mx.int32)).sum(keepdims=True)
    left = mx.maximum(p[kept] - q[kept], 0.0)
    # rounding may leave nothing where both are equal
    left = mx.where(left.sum(axis=-1, keepdims=True) > 0, left, p[kept])
    return kept, mx.random.categorical(mx.log(left)).astype(mx.int32)
