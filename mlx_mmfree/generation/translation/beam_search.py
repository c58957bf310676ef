"""Beam search: the likeliest of several texts that are written side by side."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from ...ops import log_softmax

Step = Callable[[mx.array, Any], tuple[mx.array, Any]]
"""Reads one token of each row, `(R, 1)`, after a state: the logits `(R, V)` and the new state."""


@dataclass(frozen=True)
class BeamSettings:
    """How a search goes.

    Attributes:
        num_beams: Texts that are written side by side, `K`. With one the search is greedy.
        length_penalty: Exponent `a` of the length in a text's score, the sum of its log-probabilities
            over its number of tokens to the power of `a`. 0 takes the likeliest text, which favours
            short ones.
        max_tokens: Number of tokens of the longest text.
        start: The token before the first.
        end: The token after the last.
        never: Tokens that are never written.
    """

    num_beams: int
    length_penalty: float
    max_tokens: int
    start: int
    end: int
    never: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_beams", "max_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"[beam_search] '{name}' must be positive but got {value}.")
        if not 0 <= self.length_penalty < math.inf:
            raise ValueError(
                f"[beam_search] 'length_penalty' must be a number from 0 but got {self.length_penalty}."
            )


@dataclass
class _Search:
    """What is known about one source.

    Attributes:
        tokens: What each beam has written.
        scores: The sums of their log-probabilities.
        finished: Texts that have ended, with their scores.
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

    A beam ends with the token `end`. The search for a source ends once it has `num_beams` texts that
    no open beam beats at the present length, as in transformers by default, or at the longest length,
    where every beam ends.

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
        is_last = length == settings.max_tokens
        values, places = _likeliest(logits, searches, settings, is_last=is_last)
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
    return [max(search.finished, key=lambda found: found[0])[1] for search in searches]


def _likeliest(
    logits: mx.array, searches: list[_Search], settings: BeamSettings, *, is_last: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The `2 K` best continuations of each source, best first, and their places in `(K, V)`."""
    beams, size = settings.num_beams, logits.shape[-1]
    scores = log_softmax(logits.astype(mx.float32))
    tokens = mx.arange(size)
    for token in settings.never:
        scores = mx.where(tokens == token, -mx.inf, scores)
    if is_last:
        # every text ends here, at the cost of nothing
        scores = mx.where(tokens == settings.end, mx.array(0.0), mx.array(-mx.inf))
        scores = mx.broadcast_to(scores, logits.shape)
    sums = mx.array(np.concatenate([search.scores for search in searches]).astype(np.float32))
    flat = (scores + sums[:, None]).reshape(len(searches), beams * size)
    count = min(2 * beams, beams * size)
    places = np.array(mx.argpartition(-flat, count - 1, axis=-1)[:, :count])
    values = np.take_along_axis(np.array(flat), places, axis=-1)
    order = np.argsort(-values, axis=-1, kind="stable")
    return np.take_along_axis(values, order, axis=-1), np.take_along_axis(places, order, axis=-1)


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
        values: The sums of the log-probabilities of the continuations, best first.
        beams: The beam that each continues.
        tokens: The token that each adds.
        length: Number of tokens with it.
        settings: How the search goes.
    """
    if search.is_done:
        return np.arange(settings.num_beams)
    ends = tokens == settings.end
    for n in np.flatnonzero(ends[: settings.num_beams] & np.isfinite(values[: settings.num_beams])):
        score = float(values[n]) / length**settings.length_penalty
        search.finished.append((score, search.tokens[beams[n]]))
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
    best = float(search.scores[0]) / length**settings.length_penalty
    is_full = len(search.finished) == settings.num_beams
    search.is_done = is_full and best <= search.finished[-1][0]
    return beams[chosen]
