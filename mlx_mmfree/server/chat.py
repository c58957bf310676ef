"""Answers to conversations: the way from a request to what is written and how it is read.

Other interfaces turn their requests into a `ChatRequest`, and write its answer in their own format.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ..generation import scheduling
from ..generation.answers.answer_parts import PartReader, TextReader
from ..generation.answers.completion import end_tokens
from ..generation.answers.reasoning import AnswerEnd, CallTrial, ReasoningReader
from ..generation.answers.stop_strings import TextEnd
from .answers import Answer, ChatAnswer, ShownTokens
from .errors import RequestError
from .schemas import Body, ChatRequest, Function
from .service import Endpoint, Service
from .settings import ServedModel
from .texts import Prompt, chat_prompt, text_requests
from .tool_calls.call_formats import CallFormat, call_format
from .tool_calls.readers import Functions
from .tool_calls.sources import (
    Source,
    call_or_json_source,
    call_source,
    json_source,
    strict_source,
)
from .tool_calls.values import check_pattern, patterns


@dataclass(frozen=True)
class Conversation:
    """The answer to a conversation.

    Attributes:
        served: The model.
        texts: What it is asked for.
        make_reader: Makes what takes an answer apart.
        shown: Writes tokens with their probabilities; `None` shows none.
        source: What makes the grammar of the answers; `None` if they are free.
    """

    served: ServedModel
    texts: list[scheduling.Request]
    make_reader: Callable[[], PartReader]
    shown: ShownTokens | None
    source: Source | None


B = TypeVar("B", bound=Body)


def chat_endpoint(
    service: Service,
    kind: type[B],
    as_chat: Callable[[B], ChatRequest],
    make_answer: Callable[[B, Conversation], Answer],
    *,
    names: Mapping[str, str] = MappingProxyType({}),
    caps_length: bool = False,
) -> Endpoint:
    """An endpoint that answers conversations.

    Args:
        service: Its service.
        kind: The format of its requests.
        as_chat: What such a request asks for.
        make_answer: Puts the answer to one into the format of the interface.
        names: What the interface calls the parameters of a chat, where it calls them otherwise.
        caps_length: Whether an answer that may be too long for the context is given less space, and not
            refused.
    """

    def prepare(body: B) -> tuple[ChatRequest, Conversation, Answer]:
        try:
            chat = as_chat(body)
            found = conversation(service, chat, caps_length)
        except RequestError as error:
            raise error.renamed(names) from error
        return chat, found, make_answer(body, found)

    async def endpoint(request: Request) -> Response:
        chat, found, answer = await service.prepared(request, kind, prepare)
        texts = found.texts
        if found.source is not None:
            try:
                grammar = await service.grammar(request, found.served, found.source)
            except RequestError as error:
                raise error.renamed(names) from error
            texts = [replace(text, processors=[*text.processors, grammar.copy()]) for text in texts]
        return await service.answered(request, found.served, texts, answer, chat.stream)

    return endpoint


def chat_completions(service: Service) -> Endpoint:
    """The endpoint of a service."""

    def itself(body: ChatRequest) -> ChatRequest:
        return body

    def make_answer(body: ChatRequest, found: Conversation) -> Answer:
        name, texts = found.served.name, len(found.texts)
        return ChatAnswer(name, texts, found.make_reader, found.shown, body.stream_options)

    return chat_endpoint(service, ChatRequest, itself, make_answer)


def conversation(service: Service, body: ChatRequest, caps_length: bool = False) -> Conversation:
    """The answer to a request.

    Args:
        service: The service.
        body: The request.
        caps_length: As for `chat_endpoint`.

    Raises:
        RequestError: It cannot be answered.
    """
    settings = service.settings
    served, prompt, format = read(service, body)
    make_reader = partial(reader_of, body, prompt, format)
    one_call = format is not None and not body.parallel_tool_calls
    is_plain = not one_call and (prompt.reasoning_tags is None or not body.stop)

    def ending() -> TextEnd:
        return AnswerEnd(body.stop, make_reader(), one_call)

    shown = top = None
    if body.logprobs:
        shown = ShownTokens(served.tokenizer, end_tokens(served.tokenizer, settings.extra_end))
        top = body.top_logprobs or 0
    texts = text_requests(
        served,
        settings,
        body,
        [prompt],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        top_logprobs=top,
        ending=None if is_plain else ending,
        is_answer=not prompt.goes_on,
        caps_length=caps_length,
        reasoning_budget=least_of(body.reasoning_budget, settings.reasoning_budget),
    )
    source = _source(served, body, prompt, format)
    return Conversation(served, texts, make_reader, shown, source)


def reader_of(body: ChatRequest, prompt: Prompt, format: CallFormat | None) -> PartReader:
    """The reader that takes an answer to a prompt apart."""
    reader: PartReader = TextReader()
    trial = None
    if format is not None:
        make = partial(
            format.reader,
            _schemas(body.offered),
            strict={function.name for function in body.offered if function.strict},
            one=not body.parallel_tool_calls,
        )
        reader, trial = make(), CallTrial(format.reader.begins, partial(make, is_trial=True))
    if prompt.reasoning_tags is None:
        return reader
    return ReasoningReader(reader, prompt.reasoning_tags, prompt.is_thinking, prompt.goes_on, trial)


def least_of(*limits: int | None) -> int | None:
    """The smallest of some limits; `None` is none."""
    return min((limit for limit in limits if limit is not None), default=None)


def read(service: Service, body: ChatRequest) -> tuple[ServedModel, Prompt, CallFormat | None]:
    """The model of a request, what that reads, and how it writes calls; `None` if it is to write none.

    Raises:
        RequestError: The request cannot be answered.
    """
    served = service.catalogue.find(body.model, writes=True)
    _check(body)
    prompt = chat_prompt(served, body, service.settings)
    return served, prompt, _call_format(served) if body.offered else None


def _check(body: ChatRequest) -> None:
    """Refuses parameters that do not go together, or that are not offered."""
    if body.top_logprobs and not body.logprobs:
        raise RequestError(
            "[request] 'top_logprobs' must come with 'logprobs' but came alone.",
            param="top_logprobs",
        )
    if body.continue_final_message:
        _check_begun(body)
    both = body.max_tokens is not None and body.max_completion_tokens is not None
    if both and body.max_tokens != body.max_completion_tokens:
        raise RequestError(
            f"[request] 'max_tokens' must equal 'max_completion_tokens' where both are given but got "
            f"{body.max_tokens} and {body.max_completion_tokens}. Leave one out.",
            param="max_tokens",
        )
    if body.tool_choice not in ("auto", "none") and not body.forced:
        raise RequestError(
            "[request] 'tool_choice' must name one of 'tools' but names none.",
            param="tool_choice",
        )
    for function in body.offered:
        for pattern in patterns(function.parameters) if function.strict else ():
            try:
                check_pattern(pattern)
            except ValueError as error:
                raise RequestError(
                    f"[request] 'tools' must have patterns that can be followed where they are strict, "
                    f"but the function {function.name!r} has {pattern!r:.60}: {error!s:.200}.",
                    param="tools",
                    code="invalid_json_schema",
                ) from error


def _check_begun(body: ChatRequest) -> None:
    """Refuses to continue what is no text of an answer, or has a format from its first token."""
    last = body.messages[-1]
    if len(body.messages) < 2 or last.role != "assistant" or last.tool_calls:
        raise RequestError(
            "[request] 'continue_final_message' must come with 'messages' that end with a text of the "
            "role 'assistant' after other messages. Leave it out, or add that text.",
            param="continue_final_message",
        )
    if body.grammar is not None or body.forced:
        raise RequestError(
            "[request] 'continue_final_message' must be left out where 'response_format' or "
            "'tool_choice' holds the answer to a format, which begins with its first token.",
            param="continue_final_message",
        )


def _call_format(served: ServedModel) -> CallFormat:
    """How the model writes calls of tools.

    Raises:
        RequestError: The model was not taught to.
    """
    format = call_format(served.tokenizer.chat_template_source(tools=True))
    if format is None:
        raise RequestError(
            "[request] 'tools' must go to a model whose chat template has calls in a format that is "
            f"known here, but the template of {served.name!r} has none. Leave them out.",
            param="tools",
            code="unsupported_parameter",
        )
    return format


def _source(
    served: ServedModel, body: ChatRequest, prompt: Prompt, format: CallFormat | None
) -> Source | None:
    """The maker of the grammar that holds an answer to its schema or to a call; `None` if it is free."""
    reasoning_text = (
        prompt.reasoning_tags.end
        if prompt.reasoning_tags is not None and prompt.is_thinking
        else None
    )
    special = served.tokenizer.special_tokens
    schema = body.grammar
    if format is None:
        return None if schema is None else json_source(schema, special, reasoning_text)
    if body.forced:
        return call_source(format, _schemas(body.forced), special, reasoning_text)
    functions = _schemas(body.offered)
    strict = _schemas([function for function in body.offered if function.strict])
    if schema is not None:
        many = body.parallel_tool_calls
        return call_or_json_source(format, functions, strict, schema, special, reasoning_text, many)
    if not strict:
        return None
    reasoning_tags, is_thinking = prompt.reasoning_tags, prompt.is_thinking
    return strict_source(format, functions, strict, special, reasoning_tags, is_thinking)


def _schemas(functions: Iterable[Function]) -> Functions:
    """The schemas of the arguments of functions by their names."""
    return {function.name: function.parameters for function in functions}
