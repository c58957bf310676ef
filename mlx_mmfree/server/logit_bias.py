"""Makes single tokens more or less likely."""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class LogitBias:
    """Adds a number to the logits of some tokens. Texts with equal ones are handled as one batch.

    Attributes:
        biases: Token ids, each with its number.
    """

    biases: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, biases: Mapping[int, float], vocab_size: int) -> "LogitBias":
        """Those of a request.

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        largest = max(biases, default=0)
        if largest >= vocab_size:
            raise ValueError(
                f"[LogitBias] 'logit_bias' must have token ids below {vocab_size} but got {largest}."
            )
        return cls(tuple(sorted(biases.items())))

    def start(self, tokens: mx.array, valid: mx.array | None, vocab_size: int) -> tuple[()]:
        return ()

    def __call__(self, logits: mx.array, state: tuple[()]) -> mx.array:
        ids, values = zip(*self.biases, strict=True)
        return logits.at[:, mx.array(ids)].add(mx.array(values, mx.float32))

    def update(self, state: tuple[()], tokens: mx.array) -> tuple[()]:
        return ()
