"""Speculative decoding (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

Tokens are proposed, by a small draft model or by the text itself; the model reads them all at once
and keeps those that it would have chosen itself.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Sequence
from math import inf
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

from ..layers.mixer import State, StateKind, StatesByPosition
from ..models import Decoder
from ..ops import log_softmax
from .decode import (
    PREFILL_STEP_SIZE,
    DraftStats,
    Progress,
    Reader,
    are_finite,
    check_finite,
    prefill,
)
from .sampling import Draw, LogitsProcessor, Sampler, greedy


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


def check_one_kind_of_draft(draft_model: Decoder | None, ngram_drafts: bool) -> None:
    """Refuses drafts of a model and of the text together."""
    if draft_model is not None and ngram_drafts:
        raise ValueError(
            "[speculative] 'ngram_drafts' must be left out with 'draft_model' but both are given. Take "
            "one of them."
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


def accept_chosen(chosen: mx.array, drafts: list[mx.array]) -> tuple[mx.array, mx.array]:
    """How many tokens are the choices themselves `(1,)`, and the choice after them `(1,)`."""
    chosen = chosen.astype(mx.int32)
    if not drafts:
        return mx.zeros((1,), mx.int32), chosen
    is_same = (mx.concatenate(drafts) == chosen[:-1]).astype(mx.int32)
    kept = mx.cumprod(is_same).sum(keepdims=True)
    return kept, chosen[kept]


def accept_drawn(
    scores: mx.array, draft_scores: list[mx.array], drafts: list[mx.array]
) -> tuple[mx.array, mx.array]:
    """How many tokens are kept `(1,)`, and a token drawn from what they leave over `(1,)`."""
    p = mx.exp(log_softmax(scores))
    # nothing was proposed after the last token
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


class RewindingReader(Reader):
    """Reads tokens of one text, several at a time, and takes back those that turn out wrong.

    Attention forgets the keys and values of such tokens. A state that is not shortened, as that of a
    recurrence, is kept after each token instead.

    Args:
        model: Gives the logits.
        state: What it has read.
        ahead: How many tokens follow the first that are read after `take_back`, at most.
    """

    def __init__(self, model: Decoder, state: Any, ahead: int):
        super().__init__(model, state)
        self._ahead = ahead
        self._trails = [_Trail(mixer.state_kind) for mixer in model.token_mixers]
        self._unsettled = 0

    @staticmethod
    def _run(
        model: Decoder, block_arguments: list[dict[str, mx.array]], tokens: mx.array, state: Any
    ) -> tuple[mx.array, mx.array, Any]:
        hidden, state = model.hidden(
            tokens, state, block_arguments=block_arguments, by_position=True
        )
        logits = model.logits(hidden)[0].astype(mx.float32)
        return logits, are_finite(logits), state

    def read(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Reads tokens `(1, L)`.

        Returns:
            The logits after each, float32 `(L, V)`, and which are finite, `(L,)`, yet to be computed.
        """
        length = tokens.shape[1]
        if not self._unsettled and self._size + length + self._ahead > self._room:
            self.go_on(self.state, length + self._ahead)
        logits, finite, states = self._step(tokens, self.arrays)
        self.arrays = tuple(
            trail.add(state, length) for trail, state in zip(self._trails, states, strict=True)
        )
        self._size += length
        self._unsettled += length
        return logits, finite

    def take_back(self, count: int) -> None:
        """Forgets the last `count` tokens, of those that were read since the last call."""
        if self._unsettled:
            self.arrays = tuple(trail.settled(count) for trail in self._trails)
        self._size -= count
        self._unsettled = 0


class _Trail:
    """The states of a block after tokens that may be taken back.

    Args:
        kind: Shortens states.
    """

    def __init__(self, kind: StateKind):
        self._kind = kind
        # one for each stretch of tokens, and its length
        self._stretches: list[tuple[State | StatesByPosition, int]] = []

    def add(self, state: State | StatesByPosition, length: int) -> State:
        """Takes what the mixer gave for so many tokens, and returns the state after them."""
        stretches = self._stretches
        if isinstance(state, StatesByPosition):
            stretches.append((state, length))
            return state.states[-1]
        # only the last state is held, since memory that nothing else holds is written in place
        if stretches and not isinstance(stretches[-1][0], StatesByPosition):
            length += stretches.pop()[1]
        stretches.append((state, length))
        return state

    def settled(self, count: int) -> State:
        """The state before the last `count` tokens, fewer than there are; none can go back beyond it."""
        stretches, self._stretches = self._stretches, []
        while count >= stretches[-1][1]:
            count -= stretches.pop()[1]
        state, _ = stretches[-1]
        if isinstance(state, StatesByPosition):
            return state.states[-1 - count]
        return self._kind.rewound(state, count) if count else state


NUM_DRAFT_TOKENS = 3


def check_num_draft_tokens(count: int) -> None:
    if count < 1:
        raise ValueError(f"[speculative] 'num_draft_tokens' must be at least 1 but got {count}.")


class Speculation(ABC):
    """One text in the middle of decoding, of which several tokens are checked at a time.

    The model reads all proposed tokens in one call, which is compiled where its state has a form of
    fixed shapes, and keeps those that it would have chosen itself. The others are taken back.

    Args:
        reader: Has read the prompt but its last token.
        tokens: The prompt, integers `(1, L)`.
        vocab_size: How many tokens the model knows.
        num_draft_tokens: How many tokens are proposed at a time, at most.
        sampler: Chooses tokens from logits.
        processors: Change the logits before.
        max_tokens: How many tokens the text has at most; nothing is proposed beyond them.
        end: Tokens that end the text; nothing is kept after one.

    Attributes:
        stats: What the proposals were worth so far.
        from_draft: Whether the last token was proposed.
    """

    def __init__(
        self,
        reader: RewindingReader,
        tokens: mx.array,
        vocab_size: int,
        *,
        num_draft_tokens: int,
        sampler: Sampler,
        processors: Sequence[LogitsProcessor],
        max_tokens: float = inf,
        end: Collection[int] = (),
    ):
        self._target = reader
        self._last = int(tokens[0, -1])
        self._count = num_draft_tokens
        self._sampler = sampler
        self._processors = processors
        self._seen: Any = [p.start(tokens, None, vocab_size) for p in processors]
        self._left = max_tokens
        self._end = end
        self._ready: deque[tuple[int, bool]] = deque()
        self.stats = DraftStats()
        self.from_draft = False

    @property
    def num_ready(self) -> int:
        """How many tokens the next steps give without a computation."""
        return len(self._ready)

    @property
    def state(self) -> Any:
        """What the model has read, in the ordinary form; once none is ready, all tokens but the last."""
        return self._target.state

    def step(self, *, is_last: bool = False) -> list[int]:
        """The next token, as a batch of one.

        Args:
            is_last: No step follows, so nothing is proposed.
        """
        if not self._ready:
            self._ready.extend(self._round(0 if is_last else int(min(self._count, self._left - 1))))
        token, self.from_draft = self._ready.popleft()
        self._left -= 1
        return [token]

    def _round(self, most: int) -> list[tuple[int, bool]]:
        """Proposes tokens and gives those that were kept and the one that follows them."""
        drafts, seen = self._propose(most)
        tokens = mx.concatenate([mx.array([self._last], mx.int32), *drafts])
        logits, finite = self._target.read(tokens[None])
        # the positions are rows of a batch
        rows = tree_map(lambda *arrays: mx.concatenate(list(arrays)), *seen)
        kept, new = self._accept(self._process(logits, rows), drafts)
        numbers = cast(list[int], mx.concatenate([kept, new, *drafts]).tolist())
        check_finite(finite)
        accepted, self._last, proposed = numbers[0], numbers[1], numbers[2:]
        ends = (n for n, token in enumerate(proposed[:accepted]) if token in self._end)
        if (end := next(ends, None)) is not None:
            accepted, self._last = end, proposed[end]
        self._target.take_back(len(proposed) - accepted)
        self._settle(accepted, proposed)
        self._seen = self._update(seen[accepted], mx.array([self._last], mx.int32))
        mx.eval(self._target.arrays, self._arrays(), self._seen)
        stats = self.stats
        self.stats = DraftStats(stats.proposed + len(proposed), stats.accepted + accepted)
        fresh = [*proposed[:accepted], self._last]
        return [(number, n < accepted) for n, number in enumerate(fresh)]

    @abstractmethod
    def _propose(self, most: int) -> tuple[list[mx.array], list[Any]]:
        """Tokens `(1,)`, so many at most, and the penalties before each and after the last."""

    @abstractmethod
    def _accept(self, logits: mx.array, drafts: list[mx.array]) -> tuple[mx.array, mx.array]:
        """How many tokens are kept `(1,)`, and the one that follows them `(1,)`."""

    @abstractmethod
    def _settle(self, accepted: int, proposed: list[int]) -> None:
        """Takes in how many tokens were kept, and the last one."""

    def _arrays(self) -> Any:
        """What else is computed at each round."""
        return ()

    def _process(self, logits: mx.array, seen: Any) -> mx.array:
        for process, state in zip(self._processors, seen, strict=True):
            logits = process(logits, state)
        return logits

    def _update(self, seen: Any, tokens: mx.array) -> Any:
        return [
            process.update(state, tokens)
            for process, state in zip(self._processors, seen, strict=True)
        ]


class SpeculativeDecoding(Speculation):
    """One text in the middle of decoding with a draft model; steps as `Decoding` does.

    Where the sampler is a `Draw`, with p the model's probabilities and q the draft's, a proposed
    token x is kept with probability :math:`\\min(1, p(x) / q(x))`; the first one that is not is drawn
    again from :math:`\\max(p - q, 0)`, so that every token is distributed as without a draft. Any
    other sampler, greedy included, chooses from the model's logits, and proposed tokens are kept as
    long as they are its choices.

    The steps of the draft model are compiled as those of the model are.

    Args:
        model: Gives the logits.
        draft_model: Proposes tokens; has the same vocabulary.
        tokens: The prompt, integers `(1, L)`.
        num_draft_tokens: How many tokens are proposed at a time.
        state: What the model has read before the prompt.
        draft_state: What the draft model has read before it; `None`: nothing.
        sampler: Chooses tokens from logits, of both models.
        processors: Change the logits before, of both models.
        prefill_step_size: Positions of the prompt read at a time.
        progress: Called as each model reads the prompt.
        max_tokens, end: As for `Speculation`.

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
        draft_state: Any = None,
        sampler: Sampler = greedy,
        processors: Sequence[LogitsProcessor] = (),
        prefill_step_size: int = PREFILL_STEP_SIZE,
        progress: Progress | None = None,
        max_tokens: float = inf,
        end: Collection[int] = (),
    ):
        check_draft(model, draft_model)
        check_num_draft_tokens(num_draft_tokens)
        options: dict[str, Any] = {"step_size": prefill_step_size, "progress": progress}
        target, self._draft = (
            RewindingReader(
                reader, prefill(reader, tokens[:, :-1], before, **options), num_draft_tokens
            )
            for reader, before in ((model, state), (draft_model, draft_state))
        )
        super().__init__(
            target,
            tokens,
            model.vocab_size,
            num_draft_tokens=num_draft_tokens,
            sampler=sampler,
            processors=processors,
            max_tokens=max_tokens,
            end=end,
        )
        # after the last token that the draft model has read
        self._pending = [self._last]
        self._scores: list[mx.array] = []

    def _propose(self, most: int) -> tuple[list[mx.array], list[Any]]:
        seen = [self._seen]
        drafts: list[mx.array] = []
        self._scores = []
        tokens = mx.array(self._pending, mx.int32)
        for _ in range(most):
            logits, _ = self._draft.read(tokens[None])
            logits = self._process(logits[-1:], seen[-1])
            if isinstance(self._sampler, Draw):
                self._scores.append(self._sampler.scores(logits))
                chosen = mx.random.categorical(self._scores[-1])
            else:
                chosen = self._sampler(logits)
            tokens = chosen.astype(mx.int32)
            seen.append(self._update(seen[-1], tokens))
            drafts.append(tokens)
        return drafts, seen

    def _accept(self, logits: mx.array, drafts: list[mx.array]) -> tuple[mx.array, mx.array]:
        if isinstance(self._sampler, Draw):
            return accept_drawn(self._sampler.scores(logits), self._scores, drafts)
        return accept_chosen(self._sampler(logits), drafts)

    def _settle(self, accepted: int, proposed: list[int]) -> None:
        """Takes refused tokens back; the draft model has not read its last one."""
        count = len(proposed)
        if not count:
            self._pending.append(self._last)
            return
        read = min(accepted, count - 1)
        self._draft.take_back(count - 1 - read)
        self._pending = [*proposed[read:accepted], self._last]

    def _arrays(self) -> Any:
        return self._draft.arrays
