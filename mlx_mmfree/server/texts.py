"""What the scheduler is asked to write for a request."""

import re
from collections.abc import Collection, Sequence
from typing import Any

from ..errors import MMFreeError
from ..generation import LogitsProcessor, Sampler, make_processors, make_sampler
from ..generation.decode import end_tokens
from ..generation.scheduling import Request
from .errors import RequestError
from .logit_bias import LogitBias
from .prompts import Prompt, most_tokens
from .schemas.sampling import TextRequest
from .served import ServedModel
from .settings import Sampling, Settings

_SAMPLING = ("top_p", "top_k", "min_p", "min_tokens_to_keep", "xtc_probability", "xtc_threshold")
_SEEDS = 2**63


def text_requests(
    served: ServedModel,
    settings: Settings,
    body: TextRequest,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int | None,
    top_logprobs: int | None,
    stop: Sequence[str] = (),
    is_answer: bool = False,
) -> list[Request]:
    """A request of the scheduler for each text, `n` for each prompt in their order.

    Args:
        served: The model.
        settings: The limits and defaults of the server.
        body: The request of a client.
        prompts: Its prompts.
        max_tokens: The most tokens of each text; `None` for the server's own number.
        top_logprobs: How many likeliest tokens are shown beside each; `None` shows no probability.
        stop: Strings that end a text, beside those of the request.
        is_answer: Whether the texts answer their prompts, and do not continue them.

    Raises:
        RequestError: A parameter is beyond what the server or the model allows.
    """
    end = end_tokens(served.tokenizer, settings.extra_end)
    defaults = settings.sampling
    seed = defaults.seed if body.seed is None else body.seed
    try:
        sampler = _sampler(served, body, defaults, end)
        processors = _processors(served, body)
    except (ValueError, MMFreeError) as error:
        named = re.search(r"'(\w+)'", str(error))
        raise RequestError(str(error), param=named and named[1]) from error
    return [
        Request(
            tokens=prompt.tokens,
            max_tokens=_room(served, settings, prompt, max_tokens),
            sampler=sampler,
            processors=processors,
            stop=[*body.stop, *stop],
            end=end,
            seed=None if seed is None else (seed + number) % _SEEDS,
            top_logprobs=top_logprobs,
            marks=prompt.marks,
            is_answer=is_answer,
        )
        for prompt in prompts
        for number in range(body.n)
    ]


def _room(served: ServedModel, settings: Settings, prompt: Prompt, max_tokens: int | None) -> int:
    """How many tokens may follow a prompt."""
    most = most_tokens(served, settings)
    room = most - len(prompt.tokens)
    wanted = 1 if max_tokens is None else max_tokens
    if room < wanted:
        raise RequestError(
            f"[request] prompt and answer must have at most {most:,} tokens together "
            f"but the prompt has {len(prompt.tokens):,}"
            + ("." if max_tokens is None else f" and the answer may have {max_tokens:,}."),
            413,
            param="max_tokens" if room > 0 else None,
            code="context_length_exceeded",
        )
    return min(settings.max_tokens, room) if max_tokens is None else max_tokens


def _sampler(
    served: ServedModel, body: TextRequest, defaults: Sampling, end: Collection[int]
) -> Sampler:
    given: dict[str, Any] = {name: getattr(body, name) for name in ("temperature", *_SAMPLING)}
    values = {
        name: getattr(defaults, name) if value is None else value for name, value in given.items()
    }
    line_break = served.tokenizer.encode("\n", add_special_tokens=False)
    return make_sampler(
        temp=values.pop("temperature"), xtc_special_tokens=[*line_break, *end], **values
    )


def _processors(served: ServedModel, body: TextRequest) -> list[LogitsProcessor]:
    processors = make_processors(
        repetition_penalty=body.repetition_penalty,
        repetition_context_size=body.repetition_context_size,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
    )
    if body.logit_bias:
        processors.append(LogitBias.of(body.logit_bias, served.model.vocab_size))
    return processors
