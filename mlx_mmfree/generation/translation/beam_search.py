"""Beam search: the likeliest of several texts that are written side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from ...ops import log_softmax
from .search_settings import BeamSettings

Step = Callable[[mx.array, Any], tuple[mx.array, Any]]
"""Reads one token of each row, `(R, 1)`, after a state: the logits `(R, V)` and the new state."""


@dataclass
class _Search:
    """What is known about one source.

    Attributes:
        tokens: What each beam has written.
        scores: The sums of their log-probabilities; of one beam, its last logit.
        finished: Texts that have ended, with their scores, best first.
        is_done: Whether no beam can become better than those.
    """

    tokens: list[list[int]]
    scores: np.ndarray
    finished: list[tuple[float, list[int]]] = field(default_factory=list)
    is_done: bool = False


def beam_search(
    step: Step, rows: int, settings: BeamSettings, report: Callable[[int], object] = lambda _: None
) -> list[list[int]]:
    """The best text that is found for each source.

    A beam ends with the token `end`, and at the longest length every beam ends. All rules are those of
    transformers.

    Args:
        step: Reads tokens; its rows are those of the beams, source by source.
        rows: Number of sources.
        settings: How the search goes.
        report: Called with the number of sources that are done, after each step.

    Returns:
        The tokens for each source, without the first and the last.
    """
    beams, state = settings.num_beams, None
    # all beams begin alike, so that only the first of them counts
    first = np.where(np.arange(beams) == 0, 0.0, -np.inf)
    searches = [_Search([[] for _ in range(beams)], first) for _ in range(rows)]
    tokens = np.full((rows * beams, 1), settings.start, np.int32)
    for length in range(1, settings.max_tokens + 1):
        logits, state = step(mx.array(tokens), state)
        values, places = _likeliest(logits, searches, settings, length)
        from_beam, token = np.divmod(places, logits.shape[-1])
        order = np.concatenate(
            [
                row * beams
                + _advance(search, values[row], from_beam[row], token[row], length, settings)
                for row, search in enumerate(searches)
            ]
        )
        done = sum(search.is_done for search in searches)
        report(done)
        if done == rows:
            break
        if beams > 1:
            state = tree_map(lambda array: array[mx.array(order)], state)  # noqa: B023
        tokens = np.array([[beam[-1]] for search in searches for beam in search.tokens], np.int32)
    # where the rules leave nothing to write, no text ends
    return [search.finished[0][1] if search.finished else search.tokens[0] for search in searches]


def _likeliest(
    logits: mx.array, searches: list[_Search], settings: BeamSettings, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """The best continuations of each source, best first, and their places in `(K, V)`.

    There are so many that `K` go on though each beam ends in every way.
    """
    beams, size = settings.num_beams, logits.shape[-1]
    scores = logits.astype(mx.float32)
    if beams > 1:
        scores = log_softmax(scores)
    texts = [tokens for search in searches for tokens in search.tokens]
    scores = _allowed(scores, texts, settings, length)
    if beams > 1:
        sums = np.concatenate([search.scores for search in searches]).astype(np.float32)
        scores = scores + mx.array(sums[:, None])
    flat = scores.reshape(len(searches), beams * size)
    count = min((1 + len(settings.ends)) * beams, beams * size)
    places = np.sort(np.array(mx.argpartition(-flat, count - 1, axis=-1)[:, :count]), axis=-1)
    values = np.take_along_axis(np.array(flat), places, axis=-1)
    order = np.argsort(-values, axis=-1, kind="stable")
    return np.take_along_axis(values, order, axis=-1), np.take_along_axis(places, order, axis=-1)


def _allowed(
    scores: mx.array, texts: Sequence[Sequence[int]], settings: BeamSettings, length: int
) -> mx.array:
    """Scores in which a token that must not follow its text has none, in the order of transformers.

    Args:
        scores: Scores `(R, V)`.
        texts: What the rows have written, without the first token.
        settings: Says what must not follow.
        length: Number of tokens with the next.
    """
    size = scores.shape[-1]
    if settings.repetition_penalty != 1:
        held = mx.array(_marked([[settings.start, *text] for text in texts], size))
        penalty = settings.repetition_penalty
        scores = mx.where(held, mx.where(scores > 0, scores / penalty, scores * penalty), scores)
    if settings.no_repeat_ngram_size or settings.never_together:
        rows = [_not_next([settings.start, *text], settings) for text in texts]
        scores = mx.where(mx.array(_marked(rows, size)), -mx.inf, scores)
    scores = _without(scores, settings.never)
    if length < settings.min_tokens:
        scores = _without(scores, settings.ends)
    if length == 1 and settings.forced_first is not None:
        scores = _only(scores, (settings.forced_first,))
    if length == settings.max_tokens and settings.last:
        scores = _only(scores, settings.last)
    if length == (1 if settings.forced_first is None else 2):
        scores = _without(scores, settings.never_first)
    return log_softmax(scores) if settings.renormalize and settings.num_beams > 1 else scores


def _not_next(text: list[int], settings: BeamSettings) -> list[int]:
    """The tokens that would complete a sequence that must not be written, or not again."""
    size = settings.no_repeat_ngram_size
    found = [seq[-1] for seq in settings.never_together if tuple(text[1 - len(seq) :]) == seq[:-1]]
    if size and len(text) >= size - 1:
        before = text[len(text) - size + 1 :]
        starts = range(len(text) - size + 1)
        found += [text[n + size - 1] for n in starts if text[n : n + size - 1] == before]
    return found


def _marked(rows: Sequence[Sequence[int]], size: int) -> np.ndarray:
    """Where each row has its tokens, booleans `(R, V)`."""
    marks = np.zeros((len(rows), size), bool)
    for mark, tokens in zip(marks, rows, strict=True):
        mark[list(tokens)] = True
    return marks


def _without(scores: mx.array, tokens: Sequence[int]) -> mx.array:
    marks = _marked([tokens], scores.shape[-1])
    return mx.where(mx.array(marks), -mx.inf, scores) if tokens else scores


def _only(scores: mx.array, tokens: Sequence[int]) -> mx.array:
    """Scores that leave nothing but some tokens, at no cost."""
    marks = mx.array(_marked([tokens], scores.shape[-1]))
    return mx.broadcast_to(mx.where(marks, mx.array(0.0), mx.array(-mx.inf)), scores.shape)


def _advance(
    search: _Search,
    values: np.ndarray,
    beams: np.ndarray,
    tokens: np.ndarray,
    length: int,
    settings: BeamSettings,
) -> np.ndarray:
    """Takes the best continuations of a source; returns the beam that each new one goes on from.

    Args:
        search: The source; it is changed.
        values: The sums of the scores of the continuations, best first.
        beams: The beam that each continues.
        tokens: The token that each adds.
        length: Number of tokens with it.
        settings: How the search goes.
    """
    if search.is_done:
        return np.arange(settings.num_beams)
    is_end = np.isin(tokens, settings.ends)
    ends = is_end | (length == settings.max_tokens)
    for n in np.flatnonzero(ends[: settings.num_beams] & np.isfinite(values[: settings.num_beams])):
        score = float(values[n]) / length**settings.length_penalty
        last = [] if is_end[n] else [int(tokens[n])]
        search.finished.append((score, [*search.tokens[beams[n]], *last]))
    search.finished.sort(key=lambda found: -found[0])
    del search.finished[settings.num_beams :]
    # so many continuations were asked for that enough of them go on
    going = np.flatnonzero(~ends)[: settings.num_beams]
    if not len(going):
        search.is_done = True
        return np.arange(settings.num_beams)
    chosen = np.resize(going, settings.num_beams)
    search.tokens = [[*search.tokens[beams[n]], int(tokens[n])] for n in chosen]
    search.scores = np.where(np.arange(settings.num_beams) < len(going), values[chosen], -np.inf)
    search.is_done = _is_done(search, length, settings)
    return beams[chosen]


def _is_done(search: _Search, length: int, settings: BeamSettings) -> bool:
    """Whether no open beam is worth going on with."""
    if len(search.finished) < settings.num_beams:
        return False
    if settings.num_beams == 1 or settings.early_stopping is True:
        return True
    if settings.early_stopping == "never":
        length = settings.max_tokens
    best = float(search.scores[0]) / length**settings.length_penalty
    return best <= search.finished[-1][0]
