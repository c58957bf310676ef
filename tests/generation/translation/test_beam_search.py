"""Beam search over made-up probabilities, against a search of all texts."""

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.generation.translation import BeamSettings, Step, beam_search

START, END, SIZE = 0, 1, 4


def settings(**changes: object) -> BeamSettings:
    values = {"num_beams": 2, "length_penalty": 1.0, "max_tokens": 5, "start": START, "end": END}
    return BeamSettings(**values | changes)  # type: ignore[arg-type]


def table(seed: int) -> np.ndarray:
    """The log-probability of each token after each, and after how many."""
    logits = np.random.default_rng(seed).normal(size=(6, SIZE, SIZE)) * 2
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def stepping(*tables: np.ndarray, beams: int) -> Step:
    """A model whose state is the number of tokens read and, to be gathered, the row of its table."""
    rows = mx.array(np.repeat(np.arange(len(tables)), beams))
    stacked = mx.array(np.stack(tables).astype(np.float32))

    def step(tokens: mx.array, state: object) -> tuple[mx.array, object]:
        read, row = (mx.zeros_like(rows), rows) if state is None else state  # type: ignore[misc]
        return stacked[row, read, tokens[:, 0]], (read + 1, row)

    return step


def best(table: np.ndarray, penalty: float, longest: int) -> list[int]:
    """The best of all texts that end before the longest length, or are cut there at no cost."""
    found = {}
    for length in range(longest):
        for text in itertools.product([t for t in range(SIZE) if t != END], repeat=length):
            ids, score = [START, *text], 0.0
            for n, (last, token) in enumerate(itertools.pairwise([*ids, END])):
                if n < longest - 1 or token != END:
                    score += table[n, last, token]
            found[text] = score / (length + 1) ** penalty
    return list(max(found, key=lambda text: found[text]))


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_with_enough_beams_the_best_text_is_found(seed: int, penalty: float) -> None:
    """The search for a source ends early only where length cannot help, which 0 promises."""
    probabilities = table(seed)
    search = settings(num_beams=300, length_penalty=penalty, max_tokens=4)
    (got,) = beam_search(stepping(probabilities, beams=300), 1, search)
    assert got == best(probabilities, penalty, 4)


def test_one_beam_is_greedy() -> None:
    for seed in range(8):
        probabilities, want, last = table(seed), [], START
        for n in range(5):
            last = int(probabilities[n, last].argmax())
            if last == END:
                break
            want.append(last)
        (got,) = beam_search(stepping(probabilities, beams=1), 1, settings(num_beams=1))
        # the last of the longest text is its end
        assert got == want[:4]


def test_sources_do_not_see_each_other() -> None:
    tables = [table(seed) for seed in range(5)]
    together = beam_search(stepping(*tables, beams=3), 5, settings(num_beams=3))
    for each, got in zip(tables, together, strict=True):
        assert [got] == beam_search(stepping(each, beams=3), 1, settings(num_beams=3))


def test_some_tokens_are_never_written() -> None:
    for seed in range(5):
        (got,) = beam_search(stepping(table(seed), beams=2), 1, settings(never=(2,)))
        assert 2 not in got


def test_progress_counts_what_is_done() -> None:
    seen: list[int] = []
    beam_search(stepping(table(0), table(1), beams=2), 2, settings(), seen.append)
    assert seen == sorted(seen) and seen[-1] == 2


@pytest.mark.parametrize(
    "change",
    [{"num_beams": 0}, {"max_tokens": 0}, {"length_penalty": -1.0}, {"length_penalty": math.nan}],
    ids=str,
)
def test_numbers_out_of_bounds_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"'{next(iter(change))}' must be"):
        settings(**change)
