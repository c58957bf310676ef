"""How likely given continuations of given texts are to a model."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..generation.decode import PREFILL_STEP_SIZE, are_finite, check_finite
from ..models import Decoder
from ..models.parts.stack import check_tokens
from ..ops import cross_entropy
from .perplexity import LOGITS_AT_A_TIME


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
    made for, the beginning is left out.

    Args:
        model: The model.
        pairs: Token ids of a context, at least one, and of its continuation.
        batch_size: Number of texts read at a time.
        prefill_step_size: Number of tokens of each text read at a time.
        progress: Called with the number of texts scored since the last call.

    Returns:
        A score for each pair.

    Raises:
        ValueError: A context is empty, a token is not in the vocabulary, or a continuation has more
            tokens than the model was made for.
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
        if not len(context):
            raise ValueError(
                "[score_continuations] 'pairs' must have contexts of at least one token but one is "
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
