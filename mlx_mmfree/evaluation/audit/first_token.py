"""The texts of Metal kernels that a model's first token compiles. No Metal device is needed."""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from ...models import Decoder
from ...ops.backend import choice, dispatch, launch
from ...ops.backend.compilation import without_fusion
from ...ops.backend.metal_functions import record_half_denormals
from .metal_step import merged_projections
from .record import record


def first_token_texts(model: Decoder, prompt_length: int) -> tuple[list[str], list[str]]:
    """The names of the texts of this library that Metal compiles, in the order in which they are met.

    Those that only check a kernel are among them: they are compiled once, and what they find is kept.
    The kernels are those that are chosen where none was timed.

    Args:
        model: Its weights need no values.
        prompt_length: The tokens of a prompt, which the model reads at once.

    Returns:
        Those for the prompt, and those that the next token adds.

    Raises:
        UnsupportedModelError: The model cannot continue a text.
        BackendError: The compiled extension cannot be used.
    """
    with _on_metal(model), launch.recording() as texts:
        record_half_denormals()
        with mx.stream(mx.cpu), without_fusion():
            hidden, _ = model.hidden(mx.zeros((1, prompt_length), mx.uint32))
            model.logits(hidden[:, -1:])
        of_prompt = [*texts]
    with _on_metal(model), launch.recording() as texts:
        record(model, prompt_length, has_tails=True)
    return of_prompt, [name for name in texts if name not in of_prompt]


@contextmanager
def _on_metal(model: Decoder) -> Iterator[None]:
    with dispatch.use_any_backend(), choice.use(choice.DEFAULT), merged_projections(model):
        dispatch.forget_candidates()
        try:
            yield
        finally:
            dispatch.forget_candidates()
