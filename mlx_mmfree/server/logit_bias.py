"""Makes single tokens more or less likely."""

from collections.abc import Mapping

import mlx.core as mx


class LogitBias:
    """Adds a number to the logits of some tokens.

    Args:
        biases: The numbers by token id.
        vocab_size: Every id is below it.

    Raises:
        ValueError: An id is outside the vocabulary.
    """

    def __init__(self, biases: Mapping[int, float], vocab_size: int):
        largest = max(biases, default=0)
        if largest >= vocab_size:
            raise ValueError(
                f"[LogitBias] 'logit_bias' must have token ids below {vocab_size} but got {largest}."
            )
        self._ids = mx.array(list(biases), dtype=mx.int32)
        self._values = mx.array(list(biases.values()), dtype=mx.float32)

    def start(self, tokens: mx.array, valid: mx.array | None, vocab_size: int) -> tuple[()]:
        return ()

    def __call__(self, logits: mx.array, state: tuple[()]) -> mx.array:
        return logits.at[:, self._ids].add(self._values)

    def update(self, state: tuple[()], tokens: mx.array) -> tuple[()]:
        return ()
