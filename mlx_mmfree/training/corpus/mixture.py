"""Mixtures of token sequences. The rows of a step depend only on the seed and the step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...files.stored_array import StoredArray

Tokens = np.ndarray | StoredArray
"""The token ids of a file, `(n,)`."""


@dataclass(frozen=True)
class Stage:
    """A part of a training run with its own mixture of files.

    Attributes:
        until: Fraction of all steps at which the stage ends.
        weights: Weight of each file, by its path. A file is drawn in proportion to weight times size.
    """

    until: float
    weights: Mapping[str, float]


RANDOM, EPOCHS = ORDERS = ("random", "epochs")
"""The orders in which sequences can be drawn."""


class Mixture(Protocol):
    """The rows of each step of a run."""

    def rows(self, step: int) -> np.ndarray:
        """The token ids of one step, int32 `(rows, length + 1)`."""


class RandomMixture:
    """Windows at random places, drawn anew for every row.

    Args:
        tokens: The token ids of each file, by its path.
        stages: The stages in order. The last ends at 1.
        seed: Seed of the draws.
        steps: Number of steps of the run.
        rows: Number of rows of a step.
        length: Number of tokens predicted in a row.
    """

    def __init__(
        self,
        tokens: Mapping[str, Tokens],
        stages: Sequence[Stage],
        seed: int,
        *,
        steps: int,
        rows: int,
        length: int,
    ):
        self._tokens = tokens
        self._stages = stages
        self._seed = seed
        self._steps = steps
        self._rows = rows
        self._length = length

    def rows(self, step: int) -> np.ndarray:
        """The token ids of one step, int32 `(rows, length + 1)`."""
        progress = step / self._steps
        stage = next(s for s in self._stages if progress < s.until)
        names, shares = stage_shares(self._tokens, stage)
        random = np.random.Generator(np.random.Philox(key=[self._seed, step]))
        rows = []
        for name in random.choice(len(names), self._rows, p=shares):
            tokens = self._tokens[names[name]]
            start = random.integers(0, len(tokens) - self._length)
            rows.append(tokens[start : start + self._length + 1].astype(np.int32))
        return np.stack(rows)


def stage_shares(tokens: Mapping[str, Tokens], stage: Stage) -> tuple[list[str], np.ndarray]:
    """The files of a stage and the share of rows that each of them gives."""
    names = list(stage.weights)
    sizes = np.array([len(tokens[name]) * stage.weights[name] for name in names])
    return names, sizes / sizes.sum()
