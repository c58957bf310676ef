"""Runs an exported step again, and compares it with the model."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from ...errors import CheckpointError
from ...models import Decoder
from ..finite import are_finite, check_finite
from ..reader import Reader
from .step import TOKEN_DTYPE

Step = Callable[..., Sequence[mx.array]]

CHOSEN_TOKENS = 8
TOLERANCE = 0.5
"""The most by which logits may differ from those of the model's kernels, as a share of the largest.
Kernels add norms up in another order, which moves a code of 8 bits to its neighbour now and then: logits
of a large model with random weights differed by 0.09. Beyond this, something else is computed."""


class Example(NamedTuple):
    """What a step must do.

    Attributes:
        prompt: Tokens to read.
        tokens: The most likely tokens after them, one after the other.
    """

    prompt: list[int]
    tokens: list[int]


class Run(NamedTuple):
    """What a step did.

    Attributes:
        example: What it read and chose.
        results: All that it gave after each token.
    """

    example: Example
    results: list[list[mx.array]]


def run(first: Sequence[mx.array], step: Step, prompt: Sequence[int]) -> Run:
    """Reads a prompt and then the tokens that are chosen greedily.

    Args:
        first: The state before the first token.
        step: Takes a token and a state.
        prompt: Tokens to begin with, one at least.
    """
    state, tokens, results = list(first), list(prompt), []
    for place in range(len(prompt) + CHOSEN_TOKENS - 1):
        logits, *state = step(mx.array([tokens[place]], TOKEN_DTYPE), *state)
        mx.eval(logits, state)
        results.append([logits, *state])
        if place + 1 >= len(prompt):
            tokens.append(cast(int, mx.argmax(logits).item()))
    return Run(Example(list(prompt), tokens[len(prompt) :]), results)


def check_equal(found: Run, expected: Run) -> None:
    """Refuses an imported step that does not compute what was exported.

    Raises:
        CheckpointError: A bit of a logit or of a state differs.
        NumericalError: The logits are not finite.
    """
    for got, want in zip(found.results, expected.results, strict=True):
        check_finite(are_finite(want[0]))
        if not all(mx.array_equal(*pair).item() for pair in zip(got, want, strict=True)):
            raise CheckpointError(
                "[export] the imported function must give the logits and states of the exported one "
                "but gives others. The export is thrown away; please report this."
            )


class Agreement(NamedTuple):
    """How near a step is to the model as it runs here.

    Attributes:
        difference: The largest difference of a logit, as a share of the largest logit.
        same_tokens: Whether both find the same token most likely, each time.
    """

    difference: float
    same_tokens: bool


def agreement(found: Run, model: Decoder) -> Agreement:
    """Compares a run with the model, which reads the same tokens with whatever is fastest here.

    Raises:
        CheckpointError: The logits differ by more than `TOLERANCE`.
    """
    reader = Reader(model, model.init_state(1))
    prompt, tokens = found.example
    largest, difference, same_tokens = 0.0, 0.0, True
    for token, (got, *_) in zip(prompt + tokens[:-1], found.results, strict=True):
        want, _ = reader.read(mx.array([token], TOKEN_DTYPE))
        largest = max(largest, _largest(want))
        difference = max(difference, _largest(got - want))
        same_tokens &= mx.argmax(got).item() == mx.argmax(want).item()
    result = Agreement(difference / largest, same_tokens)
    if not result.difference <= TOLERANCE:
        raise CheckpointError(
            f"[export] the logits must be those of the model within {TOLERANCE} of the largest but "
            f"differ by {result.difference:.3g}. The export is thrown away; please report this."
        )
    return result


def _largest(array: mx.array) -> float:
    return cast(float, mx.max(mx.abs(array)).item())
