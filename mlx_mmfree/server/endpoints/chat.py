"""`/v1/chat/completions`: answers a conversation."""

from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...generation.decode import end_tokens
from ..answers.chat import ChatAnswer
from ..answers.logprobs import ShownTokens
from ..errors import RequestError
from ..grammar import Source, call_source, json_source
from ..prompts import chat_prompt
from ..schemas.chat import ChatRequest
from ..served import ServedModel
from ..service import Service
from ..texts import text_requests
from ..tools.families import CallForm, call_form
from .completions import Endpoint, stream_options


def chat_completions(service: Service) -> Endpoint:
    """The endpoint of a service."""
    settings = service.settings

    def prepare(body: ChatRequest) -> tuple[Any, ...]:
        served = service.catalogue.find(body.model)
        _check(body)
        prompt = chat_prompt(served, body, settings)
        form = _call_form(served) if body.offered else None
        names = frozenset(function.name for function in body.offered)
        make_reader = None if form is None else partial(form.reader, names)
        shown = top = None
        if body.logprobs:
            shown = ShownTokens(served.tokenizer, end_tokens(served.tokenizer, settings.extra_end))
            top = body.top_logprobs or 0
        max_tokens = body.max_completion_tokens or body.max_tokens
        texts = text_requests(
            served,
            settings,
            body,
            [prompt],
            max_tokens=max_tokens,
            top_logprobs=top,
            stop=_after_one_call(body, form),
            is_answer=True,
        )
        answer = ChatAnswer(served.name, len(texts), make_reader, shown)
        return served, texts, answer, stream_options(body), _source(body, form)

    async def endpoint(request: Request) -> Response:
        *prepared, source = await service.prepared(request, ChatRequest, prepare)
        served, texts, answer, stream = prepared
        if source is not None:
            grammar = await service.grammar(request, served, source)
            texts = [replace(text, processors=[*text.processors, grammar.copy()]) for text in texts]
        return await service.answered(request, served, texts, answer, stream)

    return endpoint


def _check(body: ChatRequest) -> None:
    """Refuses parameters that do not go together, or that are not offered."""
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError(
            "[request] 'top_logprobs' must come with 'logprobs' but came alone.",
            param="top_logprobs",
        )
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
    if body.grammar is not None and body.offered:
        raise RequestError(
            "[request] 'response_format' must be left out with 'tools', whose calls have a form of "
            "their own.",
            param="response_format",
        )


def _call_form(served: ServedModel) -> CallForm:
    """How the model writes calls of tools.

    Raises:
        RequestError: The model was not taught to.
    """
    form = call_form(served.tokenizer.chat_template_source(tools=True))
    if form is None:
        raise RequestError(
            "[request] 'tools' must go to a model whose chat template has calls in a form that is known "
            f"here, but that of {served.name!r} has none. Leave them out.",
            param="tools",
            code="unsupported_parameter",
        )
    return form


def _after_one_call(body: ChatRequest, form: CallForm | None) -> list[str]:
    """What ends an answer that may hold no second call."""
    if form is None or body.parallel_tool_calls or not form.end:
        return []
    return [form.end.strip()]


def _source(body: ChatRequest, form: CallForm | None) -> Source | None:
    """What makes the grammar that holds an answer to its schema or to a call; `None` if it is free."""
    if form is not None and body.forced:
        return call_source(form, {function.name: function.parameters for function in body.forced})
    return None if body.grammar is None else json_source(body.grammar)
