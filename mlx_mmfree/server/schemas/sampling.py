"""What requests for texts have in common: how tokens are chosen and what ends a text."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from .checking import Body

MAX_STOPS = 16
_MAX_STOP_LENGTH = 1000
_MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20
_INT64 = 2**63


def _stops(value: Any) -> Any:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise ValueError("must be a string or a list of strings")
    if len(strings) > MAX_STOPS or not all(0 < len(text) <= _MAX_STOP_LENGTH for text in strings):
        raise ValueError(
            f"must hold at most {MAX_STOPS} strings of 1 to {_MAX_STOP_LENGTH} characters"
        )
    return strings


def _biases(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) > _MAX_BIASES:
        raise ValueError(f"must be an object of at most {_MAX_BIASES} biases by token id")
    if not all(key.isdecimal() and key.isascii() and len(key) < 10 for key in value):
        raise ValueError("must have token ids as its keys")
    biases = {int(key): bias for key, bias in value.items()}
    if len(biases) < len(value):
        raise ValueError("must name no token id twice, as 1 and 01 do,")
    return biases


class StreamOptions(Body):
    """How an answer streams."""

    include_usage: bool = False
    # padding against listeners, which is allowed to be left out
    include_obfuscation: bool = False


Bias = Annotated[float, Field(ge=-100, le=100)]


User = Annotated[str, Field(max_length=64)]
"""Whom a request is for; it stands in the log."""


class TextRequest(Body):
    """A request for texts, of either form."""

    neutral: ClassVar[Mapping[str, Any]] = {"service_tier": ("auto", "default"), "store": (False,)}

    model: str | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    repetition_context_size: Annotated[int, Field(ge=1, le=4096)] = 20
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_biases)] = Field(default_factory=dict)
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    min_tokens_to_keep: Annotated[int | None, Field(ge=1, le=1000)] = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    seed: Annotated[int | None, Field(ge=-_INT64, lt=2 * _INT64)] = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_k: Annotated[int | None, Field(ge=0, le=1_000_000)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    xtc_probability: Annotated[float | None, Field(ge=0, le=1)] = None
    xtc_threshold: Annotated[float | None, Field(ge=0, le=0.5)] = None
    user: User = ""
