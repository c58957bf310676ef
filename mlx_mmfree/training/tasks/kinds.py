"""Finds the task of a model."""

from typing import Any

from ...errors import UnsupportedModelError
from ...models import (
    Decoder,
    EncoderDecoder,
    ImageClassifier,
    MaskedLM,
    SequenceClassifier,
    check_causal,
)
from .causal_lm import CausalLMTask
from .classifier import ClassifierTask
from .encoder_decoder import EncoderDecoderTask
from .images import ImageTask
from .masked_lm import MaskedLMTask
from .task import Task

_TASKS: dict[type, type[Task]] = {
    Decoder: CausalLMTask,
    MaskedLM: MaskedLMTask,
    SequenceClassifier: ClassifierTask,
    EncoderDecoder: EncoderDecoderTask,
    ImageClassifier: ImageTask,
}


def task_of(model: Any) -> type[Task]:
    """What a model learns in a run from files.

    Raises:
        UnsupportedModelError: Nothing, or the model is to continue texts but sees what comes after.
    """
    if isinstance(model, Decoder):
        check_causal(model)
    for kind, task in _TASKS.items():
        if isinstance(model, kind):
            return task
    raise UnsupportedModelError(
        f"[train] a model for {model.purpose} cannot be trained with `mmfree train`."
    )
