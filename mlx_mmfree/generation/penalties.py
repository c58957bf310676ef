"""Penalties on tokens that a text already holds.

A `LogitsProcessor` carries what it has seen as arrays with the batch on axis 0, so that a decoding
step never waits for the host.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

State = Any


class LogitsProcessor(Protocol):
    """Changes the logits of each step, given what was read and written so far.

    Texts whose processors are equal are handled as one batch.

    Example:
        >>> class Never:
        ...     def start(self, tokens, valid, vocab_size):
        ...         return mx.arange(vocab_size) == 0
        ...     def __call__(self, logits, state):
        ...         return mx.where(state, -mx.inf, logits)
        ...     def update(self, state, tokens):
        ...         return state
        >>> never: LogitsProcessor = Never()
        >>> never(mx.zeros((1, 3)), never.start(mx.array([[5]]), None, 3)).tolist()
        [[-inf, 0.0, 0.0]]
    """

    def start(self, tokens: mx.array, valid: mx.array | None, vocab_size: int) -> State:
        """The state after the prompt: `tokens` `(B, L)`, left-padded where `valid` is `False`."""

    def __call__(self, logits: mx.array, state: State) -> mx.array:
        """The changed logits `(B, V)`."""

    def update(self, state: State, tokens: mx.array) -> State:
        """The state after the chosen `tokens` `(B,)`."""


@dataclass(frozen=True)
class RepetitionPenalty:
    r"""Makes the last tokens of prompt and text less likely (Keskar et al., arXiv 1909.05858).

    .. math::
        z_v \leftarrow z_v / p \text{ if } z_v > 0 \text{ else } z_v\,p

    Args:
        penalty: The factor :math:`p`; 1 changes nothing.
        context_size: How many of the last tokens count.

    Raises:
        ValueError: A number is out of its bounds.

    Example:
        >>> penalty = RepetitionPenalty(2.0)
        >>> state = penalty.start(mx.array([[1, 2]]), None, vocab_size=3)
        >>> penalty(mx.array([[1.0, 1.0, -1.0]]), state).tolist()
        [[1.0, 0.5, -2.0]]
    """

    penalty: float
    context_size: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.penalty < math.inf:
            raise ValueError(
                "[RepetitionPenalty] 'repetition_penalty' must be positive and finite but got "
                f"{self.penalty}."
            )
        if self.context_size < 1:
            raise ValueError(
                f"[RepetitionPenalty] 'repetition_context_size' must be at least 1 but got "
                f"{self.context_size}."
            )

    def start(self, tokens: mx.array, valid: mx.array | None, vocab_size: int) -> mx.array:
        # Empty places repeat the last token: it counts anyway, and no longer than they stay.
        last = tokens[:, -1:]
        if valid is not None:
            tokens = mx.where(valid, tokens, last)
        missing = max(0, self.context_size - tokens.shape[1])
        filler = mx.repeat(last, missing, axis=1)
        return mx.concatenate([filler, tokens[:, -self.context_size :]], axis=1)

    def __call__(self, logits: mx.array, state: mx.array) -> mx.array:
        seen = mx.take_along_axis(logits, state, axis=-1)
        seen = mx.where(seen > 0, seen / self.penalty, seen * self.penalty)
        return mx.put_along_axis(logits, state, seen, axis=-1)

    def update(self, state: mx.array, tokens: mx.array) -> mx.array:
        return mx.concatenate([state[:, 1:], tokens[:, None].astype(state.dtype)], axis=1)


@dataclass(frozen=True)
class CountPenalty:
    r"""Makes tokens less likely that were already written, the prompt not counted.

    .. math::
        z_v \leftarrow z_v - f\,c_v - p\,[c_v > 0]

    with :math:`c_v` the number of times that token v was written.

    Args:
        presence: The penalty :math:`p`, once for a token that was written.
        frequency: The penalty :math:`f`, for each time.

    Raises:
        ValueError: A penalty is not finite.

    Example:
        >>> penalty = CountPenalty(presence=0.5, frequency=1.0)
        >>> state = penalty.start(mx.array([[0]]), None, vocab_size=3)
        >>> penalty(mx.zeros((1, 3)), penalty.update(state, mx.array([2]))).tolist()
        [[0.0, 0.0, -1.5]]
    """

    presence: float = 0.0
    frequency: float = 0.0

    def __post_init__(self) -> None:
        for name in ("presence", "frequency"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise ValueError(f"[CountPenalty] '{name}_penalty' must be finite but got {value}.")

    def start(self, tokens: mx.array, valid: mx.array | None, vocab_size: int) -> mx.array:
        return mx.zeros((tokens.shape[0], vocab_size))

    def __call__(self, logits: mx.array, state: mx.array) -> mx.array:
        return logits - self.frequency * state - self.presence * (state > 0)

    def update(self, state: mx.array, tokens: mx.array) -> mx.array:
        return state + (mx.arange(state.shape[-1]) == tokens[:, None])


def make_processors(
    repetition_penalty: float = 1.0,
    repetition_context_size: int = 20,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> list[LogitsProcessor]:
    """The penalties that are asked for.

    Args:
        repetition_penalty: Factor on the last tokens of prompt and text; 1 for none.
        repetition_context_size: How many of the last tokens it looks at.
        presence_penalty: Taken off the logit of a token that was written; 0 for none.
        frequency_penalty: Taken off for each time that a token was written; 0 for none.

    Returns:
        What `processors` of `generate` takes; empty if nothing is asked for.

    Raises:
        ValueError: A value is out of its bounds.

    Example:
        >>> make_processors(repetition_penalty=1.1)
        [RepetitionPenalty(penalty=1.1, context_size=20)]
    """
    repetition = RepetitionPenalty(repetition_penalty, repetition_context_size)
    counts = CountPenalty(presence_penalty, frequency_penalty)
    processors: list[LogitsProcessor] = []
    if repetition_penalty != 1:
        processors.append(repetition)
    if presence_penalty or frequency_penalty:
        processors.append(counts)
    return processors
