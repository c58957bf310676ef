"""The body of `/v1/completions`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator

from .sampling import MAX_TOP_LOGPROBS, TextRequest

Prompts = list[str] | list[list[int]]


def prompts(value: Any) -> Any:
    """One prompt or several, each a text or a list of token ids, as a list of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(map(_is_whole, value))):
        value = [value]
    are_texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
    are_ids = isinstance(value, list) and all(
        isinstance(ids, list) and all(map(_is_whole, ids)) for ids in value
    )
    if not value or not (are_texts or are_ids):
        raise ValueError("must be a text, a list of token ids, or a list of one of them")
    if not all(value):
        raise ValueError("must hold no empty prompt")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class CompletionRequest(TextRequest):
    """A request to continue prompts."""

    neutral: ClassVar[Mapping[str, Any]] = {
        **TextRequest.neutral,
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
    }

    prompt: Annotated[Prompts, PlainValidator(prompts)]
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
