"""Leaves tokens out of texts, as BERT does."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..batches import Batch

_MASKED, _REPLACED = 0.8, 0.1
"""Of the tokens that are to be filled in, those that are masked, and those that are others. The rest
stays as it is."""


@dataclass(frozen=True)
class MaskedBatch(Batch):
    """Rows of tokens, of which some are to be filled in: K of each.

    Attributes: as `Batch`, but targets and weights are `(B, K)`, and
        places: Where the targets stood, int32 `(B, K)`.
    """

    places: np.ndarray = field(kw_only=True)


def masked_count(length: int, probability: float) -> int:
    """How many of so many tokens are to be filled in."""
    return max(1, round(length * probability))


class Masking:
    r"""Chooses tokens at random, and hides most of them (Devlin et al., arXiv 1810.04805).

    Of the L tokens of a row, :math:`\max(1, \mathrm{round}(p L))` are chosen, as in the published code.
    Special tokens are chosen only in a row that holds no others. A chosen token becomes the mask with a
    probability of 0.8 and any ordinary token with one of 0.1.

    Args:
        mask: The id of the mask token.
        special: The ids of the special tokens.
        vocab_size: Number of tokens.
        probability: The share p.
    """

    def __init__(self, mask: int, special: Sequence[int], vocab_size: int, probability: float):
        self._mask = mask
        self._special = np.array(special, np.int32)
        self._ordinary = np.setdiff1d(np.arange(vocab_size, dtype=np.int32), self._special)
        self._probability = probability

    def batch(self, rows: np.ndarray, random: np.random.Generator) -> MaskedBatch:
        """The batch of rows `(B, L)`."""
        size, length = rows.shape
        count = masked_count(length, self._probability)
        may = ~np.isin(rows, self._special)
        may |= ~may.any(axis=1, keepdims=True)
        order = np.where(may, random.random(rows.shape), np.inf)
        places = np.sort(np.argsort(order, axis=1, kind="stable")[:, :count], axis=1)
        is_chosen = np.take_along_axis(may, places, axis=1)
        targets = np.take_along_axis(rows, places, axis=1)
        fate = random.random((size, count))
        others = random.choice(self._ordinary, (size, count))
        shown = np.where(fate < _MASKED, self._mask, targets)
        shown = np.where((fate >= _MASKED) & (fate < _MASKED + _REPLACED), others, shown)
        inputs = rows.copy()
        np.put_along_axis(inputs, places, np.where(is_chosen, shown, targets), axis=1)
        return MaskedBatch(
            inputs.astype(np.int32),
            targets.astype(np.int32),
            is_chosen.astype(np.float32),
            places=places.astype(np.int32),
        )
