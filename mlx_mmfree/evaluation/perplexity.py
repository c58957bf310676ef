"""How likely texts are to a language model: perplexity, and scores of given continuations."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..files.stored_array import StoredArray
from ..generation.finite_logits import are_finite, check_finite
from ..generation.reader import PREFILL_STEP_SIZE
from ..models import Decoder
from ..models.parts.token_checks import check_tokens
from ..ops import cross_entropy

_LENGTH = 256
LOGITS_AT_A_TIME = 2**25
"""Largest number of logits that are computed at a time, to limit the memory."""


@dataclass(frozen=True)
class Perplexity:
    r"""Cross-entropy over a text.

    .. math::
        \mathrm{loss} = \frac{1}{n} \sum_i x_i, \quad \mathrm{perplexity} = e^{\mathrm{loss}}, \quad
        \mathrm{bits\ per\ byte} = \frac{\sum_i x_i}{b \ln 2}

    for the negative log-likelihoods :math:`x_i` of :math:`n` tokens and a text of :math:`b` bytes.

    Attributes:
        nats: Sum of the negative log-likelihoods of the predicted tokens.
        squared_nats: Sum of the squares of these.
        tokens: Number of predicted tokens.
        size_bytes: Number of UTF-8 bytes of the text.

    Example:
        >>> measured = Perplexity(nats=20.0, squared_nats=50.0, tokens=10, size_bytes=40)
        >>> measured.loss, round(measured.perplexity, 2), round(measured.bits_per_byte, 2)
        (2.0, 7.39, 0.72)
    """

    nats: float
    squared_nats: float
    tokens: int
    size_bytes: int

    @property
    def loss(self) -> float:
        """The mean negative log-likelihood of a token, in nats."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """The exponential of `loss`, which is infinite where a float cannot hold it."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @property
    def standard_error(self) -> float:
        r"""The standard error of the perplexity, to first order, for independent tokens.

        .. math::
            e^{\bar x} \sqrt{\frac{1}{n (n - 1)} \sum_i (x_i - \bar x)^2}

        for the negative log-likelihoods :math:`x_i` of :math:`n` tokens. It is NaN for a single token.
        """
        if self.tokens < 2:
            return math.nan
        squares = max(self.squared_nats - self.nats * self.loss, 0.0)
        return self.perplexity * math.sqrt(squares / (self.tokens * (self.tokens - 1)))

    @property
    def bits_per_byte(self) -> float:
        """The bits that a byte of text takes, which can be compared between vocabularies."""
        return self.nats / math.log(2) / self.size_bytes


def is_recurrent(model: Decoder) -> bool:
    """Tells whether a model's state has a constant size.

    Args:
        model: The model.

    Returns:
        Whether no token mixer keeps more of a longer text.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> is_recurrent(model)
        True
    """
    return all(mixer.recurrent for mixer in model.token_mixers)


def measure_perplexity(
    model: Decoder,
    tokens: np.ndarray | StoredArray,
    size_bytes: int,
    *,
    length: int | None = None,
    batch_size: int = 16,
    carries_state: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Perplexity:
    """Measures the perplexity of a text in consecutive windows.

    Every token but the first is predicted exactly once.

    Args:
        model: The model.
        tokens: The token ids of the text in order, `(n,)` with `n` at least 2.
        size_bytes: Number of UTF-8 bytes of the text.
        length: Number of tokens predicted in a window, 256 if it is left out. No window is longer than
            the texts that the model was made for.
        batch_size: Number of windows read at a time, if each begins with an empty state.
        carries_state: Whether a window begins with the state after the one before, so that each token
            is predicted from all of the text before it.
        progress: Called with the number of tokens predicted since the last call.

    Returns:
        The sums over the text, from which its properties compute the rest.

    Raises:
        ValueError: There are fewer than two tokens, a number is not positive, or the state is carried
            on over more tokens than the model was made for.
        NumericalError: The model's logits are not finite, or all zero.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> text = "Once upon a time there was a little girl."
        >>> measured = measure_perplexity(model, np.array(tokenizer.encode(text)), len(text))
        >>> measured.perplexity < 20
        True
    """
    if len(tokens) < 2:
        raise ValueError(
            f"[measure_perplexity] 'tokens' must hold at least two ids but holds {len(tokens)}. Give a "
            "longer text."
        )
    length = window_length(model, length)
    if carries_state:
        _check_whole(model, len(tokens) - 1)
    for name, value in (("size_bytes", size_bytes), ("length", length), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"[measure_perplexity] '{name}' must be at least 1 but got {value}.")
    starts = range(0, len(tokens) - 1, length)
    group_size = 1 if carries_state else batch_size
    state: Any = None
    nats = squared_nats = 0.0
    for first in range(0, len(starts), group_size):
        group = [tokens[start : start + length + 1] for start in starts[first : first + group_size]]
        width = len(group[0])
        # the last window may be shorter: its row is padded, and the padding is not counted
        padded = [np.pad(row, (0, width - len(row))) for row in group]
        batch = mx.array(np.stack(padded).astype(np.int32, copy=False))
        counted = mx.array([[len(row) - 1] for row in group]) > mx.arange(width - 1)
        hidden, new_state = model.hidden(batch[:, :-1], state)
        losses = _losses(model, hidden, batch[:, 1:])[np.array(counted).reshape(-1)]
        if carries_state:
            mx.eval(new_state)
            state = new_state
        nats += float(losses.sum())
        squared_nats += float(np.square(losses).sum())
        if progress is not None:
            progress(len(losses))
    return Perplexity(nats, squared_nats, len(tokens) - 1, size_bytes)


def window_length(model: Decoder, length: int | None = None) -> int:
    """The tokens of a window: `length`, or 256, but at most as many as the model was made for."""
    wanted = _LENGTH if length is None else length
    return wanted if model.context_length is None else min(wanted, model.context_length)


def _check_whole(model: Decoder, count: int) -> None:
    most = model.context_length
    if most is not None and count > most:
        raise ValueError(
            f"[measure_perplexity] 'carries_state' must be False for a text of {count} tokens, since "
            f"the model was made for {most}, but is True. Begin each window with an empty state."
        )


def _losses(model: Decoder, hidden: mx.array, targets: mx.array) -> np.ndarray:
    """The negative log-likelihood of each target, float64 `(B * L,)`."""
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    step = max(1, LOGITS_AT_A_TIME // model.vocab_size)
    losses = []
    for first in range(0, len(targets), step):
        logits = model.logits(hidden[first : first + step])
        part, finite = cross_entropy(logits, targets[first : first + step]), are_finite(logits)
        mx.eval(part, finite)
        check_finite(finite)
        losses.append(np.array(part, np.float64))
    return np.concatenate(losses)


class Score(NamedTuple):
    """How likely a continuation is to a model.

    Attributes:
        log_likelihood: Sum of the natural logarithms of the probabilities of its tokens.
        is_greedy: Whether each of its tokens is the likeliest one.

    Example:
        >>> Score(log_likelihood=-0.5, is_greedy=True).is_greedy
        True
    """

    log_likelihood: float
    is_greedy: bool


def score_continuations(
    model: Decoder,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int = 8,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    progress: Callable[[int], object] | None = None,
) -> list[Score]:
    r"""Scores continuations of contexts. Texts of about the same length are read together.

    .. math::
        \ell = \sum_t \log p(y_t \mid x, y_{<t})

    for a context `x` and its continuation `y`. Of a text that is longer than those that the model was
    made for, the start is left out.

    Args:
        model: The model.
        pairs: Token ids of a context and of its continuation, at least one of each.
        batch_size: Number of texts read at a time.
        prefill_step_size: Number of tokens of each text read at a time.
        progress: Called with the number of texts scored since the last call.

    Returns:
        A score for each pair.

    Raises:
        ValueError: A context or a continuation is empty, a token is not in the vocabulary, or a
            continuation has more tokens than the model was made for.
        NumericalError: The model's logits are not finite, or all zero.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> context = tokenizer.encode("Once upon a")
        >>> continuation = tokenizer.encode(" time", add_special_tokens=False)
        >>> score_continuations(model, [(context, continuation)])[0].is_greedy
        True
    """
    for context, continuation in pairs:
        for name, ids in (("contexts", context), ("continuations", continuation)):
            if not len(ids):
                raise ValueError(
                    f"[score_continuations] 'pairs' must have {name} of at least one token but one is "
                    "empty."
                )
        check_tokens([*context, *continuation], model.vocab_size)
    pairs = [_within(model.context_length, *pair) for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda n: -len(pairs[n][0]) - len(pairs[n][1]))
    scores: dict[int, Score] = {}
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        batch = [pairs[n] for n in chosen]
        scores.update(zip(chosen, _score_batch(model, batch, prefill_step_size), strict=True))
        if progress is not None:
            progress(len(chosen))
    return [scores[n] for n in range(len(pairs))]


def _within(
    most: int | None, context: Sequence[int], continuation: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """The pair with the end of its context of which the model reads at most so many tokens."""
    if most is None:
        return context, continuation
    if len(continuation) > most:
        raise ValueError(
            f"[score_continuations] 'pairs' must have continuations of at most {most} tokens, the "
            f"length that the model was made for, but one has {len(continuation)}. Shorten it."
        )
    # the last token is predicted, not read
    return context[-(most + 1 - len(continuation)) :], continuation


def _score_batch(
    model: Decoder, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], step_size: int
) -> list[Score]:
    rows = [np.array([*context, *continuation], np.int32) for context, continuation in pairs]
    lengths = np.array([len(row) - 1 for row in rows])
    starts = np.array([len(context) - 1 for context, _ in pairs])
    width = int(lengths.max())
    tokens = np.stack([np.pad(row, (0, width + 1 - len(row))) for row in rows])
    position = np.arange(width)
    valid = position < lengths[:, None]
    counted = valid & (position >= starts[:, None])
    totals, greedy = np.zeros(len(rows)), np.ones(len(rows), bool)
    state: Any = None
    for first in range(0, width, step_size):
        part = slice(first, first + step_size)
        mask = None if valid[:, part].all() else mx.array(valid[:, part])
        hidden, state = model.hidden(mx.array(tokens[:, :-1][:, part]), state, mask)
        mx.eval(hidden, state)
        row, column = np.nonzero(counted[:, part])
        if len(row):
            chosen = hidden[mx.array(row), mx.array(column)]
            likelihoods, is_best = _targets(model, chosen, tokens[:, 1:][:, part][row, column])
            np.add.at(totals, row, likelihoods)
            np.logical_and.at(greedy, row, is_best)
    return [Score(float(a), bool(b)) for a, b in zip(totals, greedy, strict=True)]


def _targets(
    model: Decoder, hidden: mx.array, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The log-likelihood of each target `(N,)` given `hidden` `(N, D)`, and whether it is the best."""
    step = max(1, LOGITS_AT_A_TIME // model.vocab_size)
    likelihoods, is_best = [], []
    for first in range(0, len(targets), step):
        logits = model.logits(hidden[first : first + step])
        target = mx.array(targets[first : first + step])
        loss, best, finite = cross_entropy(logits, target), mx.argmax(logits, 1), are_finite(logits)
        mx.eval(loss, best, finite)
        check_finite(finite)
        likelihoods.append(-np.array(loss, np.float64))
        is_best.append(np.array(best == target))
    return np.concatenate(likelihoods), np.concatenate(is_best)
