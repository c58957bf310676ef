"""Speculative decoding (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

Tokens are proposed, by a small draft model or by the text itself; the model reads them all at once
and keeps those that it would have chosen itself. Drafts from the text (prompt lookup) are what followed
the last tokens where they stood before. They need no second model, and help where a text repeats what
was read or written: edits, code, quotes.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Sequence
from math import inf
from typing import Any, Protocol, cast

import mlx.core as mx
from mlx.utils import tree_map

from ..arguments import check_whole
from ..layers.mixer import State, StateKind, StatesByPosition
from ..models import Decoder
from ..ops import log_softmax
from ..ops.device import random_key, set_random_key
from . import decode
from .finite_logits import check_finite
from .reader import PREFILL_STEP_SIZE, Progress, Reader, prefill
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
        chunks, drafted = (
            [_chunk(given, n) for n in range(count)] for given in (tokenizer, draft_tokenizer)
        )
        different = next((n for n in range(count) if chunks[n] != drafted[n]), None)
        if different is None:
            return
        found = f"token {different} is {drafted[different]!r:.40}, not {chunks[different]!r:.40}"
    else:
        found = f"it has {draft_tokenizer.vocab_size} tokens, not {count}"
    raise ValueError(
        f"[speculative] 'draft_model' must come with the tokenizer of the model but {found}. Choose "
        "a smaller model of the same family."
    )


def _chunk(tokenizer: Any, token: int) -> str | None:
    try:
        return str(tokenizer.id_to_piece(token))
    except ValueError:
        return None


def accept_chosen(chosen: mx.array, drafts: list[mx.array]) -> tuple[mx.array, mx.array]:
    """How many tokens are the choices themselves `(1,)`, and the choice after them `(1,)`."""
    chosen = chosen.astype(mx.int32)
    if not drafts:
        return mx.zeros((1,), mx.int32), chosen
    is_same = (mx.concatenate(drafts) == chosen[:-1]).astype(mx.int32)
    count = mx.cumprod(is_same).sum(keepdims=True)
    return count, chosen[count]


def accept_drawn(
    scores: mx.array, draft_scores: list[mx.array], drafts: list[mx.array]
) -> tuple[mx.array, mx.array]:
    """How many drafts are accepted `(1,)`, and a token drawn from what they leave over `(1,)`."""
    p = mx.exp(log_softmax(scores))
    # nothing was proposed after the last token
    q = mx.concatenate([*(mx.exp(log_softmax(row)) for row in draft_scores), mx.zeros_like(p[:1])])
    count = mx.zeros((1,), mx.int32)
    if drafts:
        at = mx.concatenate(drafts)[:, None]
        p_at, q_at = (mx.take_along_axis(x[:-1], at, axis=-1)[:, 0] for x in (p, q))
        is_accepted = mx.random.uniform(shape=p_at.shape) * q_at < p_at
        count = mx.cumprod(is_accepted.astype(mx.int32)).sum(keepdims=True)
    left = mx.maximum(p[count] - q[count], 0.0)
    # rounding may leave nothing where both are equal
    left = mx.where(left.sum(axis=-1, keepdims=True) > 0, left, p[count])
    return count, mx.random.categorical(mx.log(left)).astype(mx.int32)


class RewindingReader(Reader):
    """Reads tokens of one text, several at a time, and takes back those that turn out wrong.

    Attention forgets the keys and values of such tokens. A state that is not shortened, such as a
    recurrence's, is kept after each token instead.

    Args:
        model: Gives the logits.
        state: What it has read.
        ahead: How many tokens follow the first that are read after `take_back`, at most.
        known: As for `Reader`.
    """

    _axis = 0

    def __init__(self, model: Decoder, state: Any, ahead: int, known: int | None = None):
        super().__init__(model, state, known)
        self._ahead = ahead
        self._trails = [_Trail(mixer.state_kind) for mixer in model.token_mixers]
        self._unsettled = 0

    def read(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Reads tokens of the text, `(L,)`.

        Returns:
            The logits after each, float32 `(L, V)`, and which are finite, `(L,)`, yet to be computed.
        """
        length = tokens.shape[0]
        if not self._unsettled and self._size + length + self._ahead > self._capacity:
            self.make_capacity(length + self._ahead)
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
    check_whole("speculative", num_draft_tokens=count)
    if count < 1:
        raise ValueError(f"[speculative] 'num_draft_tokens' must be at least 1 but got {count}.")


class Speculation(ABC):
    """One text in the middle of decoding, of which several tokens are checked at a time.

    The model reads all proposed tokens in one call, which is compiled where its state has a format of
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
        self.stats = decode.DraftStats()
        self.from_draft = False

    @property
    def num_ready(self) -> int:
        """How many tokens the next steps give without a computation."""
        return len(self._ready)

    @property
    def state(self) -> Any:
        """The model's state, in the ordinary variant; once none is ready, all tokens but the last."""
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
        """Proposes tokens and gives the accepted ones and the one that follows them."""
        drafts, seen = self._propose(most)
        tokens = mx.concatenate([mx.array([self._last], mx.int32), *drafts])
        logits, finite = self._target.read(tokens)
        # the positions are rows of a batch
        rows = tree_map(lambda *arrays: mx.concatenate(list(arrays)), *seen)
        count, new = self._accept(self._process(logits, rows), drafts)
        numbers = cast(list[int], mx.concatenate([count, new, *drafts]).tolist())
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
        self.stats = decode.DraftStats(stats.proposed + len(proposed), stats.accepted + accepted)
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
        """The other arrays of each round."""
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

    The steps of the draft model are compiled like the model's.

    Args:
        model: Gives the logits.
        draft_model: Proposes tokens; has the same vocabulary.
        tokens: The prompt, integers `(1, L)`.
        num_draft_tokens: How many tokens are proposed at a time.
        state: What the model has read before the prompt.
        draft_state: What the draft model has read before it; `None`: nothing.
        sampler: Chooses tokens from logits, of both models.
        processors: Change the logits before, of both models.
        known: As for `Reader`, of both models.
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
        known: int | None = None,
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
                reader,
                prefill(reader, tokens[:, :-1], before, **options),
                num_draft_tokens,
                known,
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
            logits, _ = self._draft.read(tokens)
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
        self._starts: dict[tuple[int, ...], int] = {}
        self._next = 0
        self.foreseen = 0
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Goes on with tokens."""
        known = self._tokens
        for token in tokens:
            index = self._next_index()
            if index is None or known[index] != token:
                self.foreseen = 0
            else:
                self.foreseen += 1
                self._next = index + 1
            # a run is known once a token has followed it
            if len(known) >= _SIZE:
                self._starts[self._run()] = len(known)
            known.append(token)

    def following(self, count: int) -> list[int]:
        """The tokens that follow, so many at most, if they are those that followed before."""
        index = self._next_index()
        return [] if index is None else self._tokens[index : index + count]

    def _next_index(self) -> int | None:
        """The index at which the next token stood before."""
        return self._next if self.foreseen else self._starts.get(self._run())

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
        """The key of the generator's next numbers, as a copy."""
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
        known: As for `Reader`.
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
        known: int | None = None,
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
            RewindingReader(model, state, num_draft_tokens, known),
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
        """Returns whether so many proposals would be worth it though all of them were refused."""
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
