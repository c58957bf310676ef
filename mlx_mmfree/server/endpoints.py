"""What each address of the server does."""

import base64
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from ..generation.decode import end_tokens
from ..models import Decoder
from ..models.parts.stack import token_array
from .answers import ChatAnswer, CompletionAnswer, ShownTokens
from .engine import Steps
from .errors import RequestError
from .grammar import Source, call_source, json_source
from .page import page_headers, page_text
from .schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from .service import Service, while_connected
from .settings import MAX_CHOICES, ServedModel
from .texts import Prompt, chat_prompt, check_size, checked_tokens, most_tokens, text_requests
from .tools import CallForm, call_form

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


def completions(service: Service) -> Endpoint:
    """The endpoint of a service."""

    def prepare(body: CompletionRequest) -> tuple[Any, ...]:
        served = service.catalogue.find(body.model)
        if len(body.prompt) * body.n > MAX_CHOICES:
            raise RequestError(
                f"[request] 'n' must ask for at most {MAX_CHOICES} texts but asks for {body.n} of "
                f"{len(body.prompt)} prompts.",
                param="n",
            )
        most, what = most_tokens(served, service.settings), "a prompt with its answer"
        prompts = []
        for text in body.prompt:
            check_size(served, [text], most, what)
            ids = checked_tokens(served, text, "prompt")
            # none that follows is read for nothing
            check_size(served, [ids], most, what)
            prompts.append(Prompt(ids))
        texts = text_requests(
            served,
            service.settings,
            body,
            prompts,
            max_tokens=body.max_tokens,
            top_logprobs=body.logprobs,
        )
        shown = None
        if body.logprobs is not None:
            shown = ShownTokens(
                served.tokenizer, end_tokens(served.tokenizer, service.settings.extra_end)
            )
        answer = CompletionAnswer(served.name, texts, body.n, shown)
        return served, texts, answer, body

    async def endpoint(request: Request) -> Response:
        prepared = await service.prepared(request, CompletionRequest, prepare)
        return await service.answered(request, *prepared)

    return endpoint


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
        return served, texts, answer, body, _source(body, form)

    async def endpoint(request: Request) -> Response:
        *prepared, source = await service.prepared(request, ChatRequest, prepare)
        served, texts, answer, body = prepared
        if source is not None:
            grammar = await service.grammar(request, served, source)
            texts = [replace(text, processors=[*text.processors, grammar.copy()]) for text in texts]
        return await service.answered(request, served, texts, answer, body)

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


def embedding_steps(model: Decoder, texts: Sequence[Sequence[int]], step_size: int) -> Steps:
    r"""The embedding of each text, `float32` `(D,)`; the work stops after each piece of a text.

    .. math::
        e = m / \lVert m \rVert, \quad m = \frac{1}{L} \sum_i h_i

    with :math:`h_i` the hidden state at token i, which the head would read.

    Args:
        model: Reads the texts.
        texts: Their ids.
        step_size: Tokens of a piece.
    """
    embeddings = []
    for text in texts:
        total = np.zeros(0)
        state = model.init_state(1)
        for first in range(0, len(text), step_size):
            piece = token_array(text[first : first + step_size], model.vocab_size)
            hidden, state = model.hidden(piece, state)
            hidden = hidden.astype(mx.float32)
            mx.eval(hidden, state)
            # in float64, since the sum is long
            part = np.asarray(hidden, np.float64)[0].sum(axis=0)
            total = part if first == 0 else total + part
            yield
        length = float(np.linalg.norm(total))
        embeddings.append((total / length if length > 0 else total).astype(np.float32))
    return embeddings


def embedding_list(
    body: EmbeddingRequest, name: str, embeddings: Sequence[np.ndarray], count: int
) -> dict[str, object]:
    """The answer to a request for embeddings of `count` tokens."""
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": embedding.tolist()
            if body.encoding_format == "float"
            else base64.b64encode(embedding.astype("<f4").tobytes()).decode(),
        }
        for index, embedding in enumerate(embeddings)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": name, "usage": usage}


def embeddings(service: Service) -> Endpoint:
    """The endpoint of a service."""

    def prepare(body: EmbeddingRequest) -> tuple[Any, ...]:
        served = service.catalogue.find(body.model)
        dims = served.model.dims
        if body.dimensions not in (None, dims):
            raise RequestError(
                f"[request] 'dimensions' must be {dims}, the width of the model, or left out but got "
                f"{body.dimensions}.",
                param="dimensions",
            )
        if len(body.input) > MAX_CHOICES:
            raise RequestError(
                f"[request] 'input' must hold at most {MAX_CHOICES} texts but holds "
                f"{len(body.input)}.",
                413,
                param="input",
            )
        check_size(served, body.input, service.settings.max_context, "'input'")
        texts = [checked_tokens(served, text, "input") for text in body.input]
        longest, most = max(map(len, texts), default=0), served.model.context_length
        if most is not None and longest > most:
            raise RequestError(
                f"[request] a text of 'input' must have at most {most:,} tokens, as many as the model "
                f"was made for, but one has {longest:,}.",
                413,
                param="input",
                code="context_length_exceeded",
            )
        check_size(served, texts, service.settings.max_context, "'input'")
        return body, served, texts, sum(map(len, texts))

    async def endpoint(request: Request) -> Response:
        body, served, texts, count = await service.prepared(request, EmbeddingRequest, prepare)
        service.check_room(1)
        steps = embedding_steps(served.model, texts, service.settings.prefill_step_size)
        request.state.model = served.name
        request.state.tokens = f"{count} tokens read"
        work = service.engine.run_steps(served, steps, service.settings.timeout_s)
        vectors = await while_connected(request, work)
        return JSONResponse(embedding_list(body, served.name, vectors, count))

    return endpoint


def models(service: Service) -> Endpoint:
    """The endpoint that lists all models of a service, or shows the one that is named."""
    created = int(time.time())

    def shown(served: ServedModel) -> dict[str, Any]:
        return {
            "id": served.name,
            "object": "model",
            "created": created,
            "owned_by": "mlx_mmfree",
            "chat_template": served.tokenizer.has_chat_template,
        }

    async def endpoint(request: Request) -> Response:
        name = request.path_params.get("name")
        if name is not None:
            return JSONResponse(shown(service.catalogue.find(name)))
        return JSONResponse({"object": "list", "data": [shown(s) for s in service.catalogue]})

    return endpoint


async def page(request: Request) -> Response:
    """The page, a file of the package."""
    return HTMLResponse(page_text(), headers=dict(page_headers()))


def health(service: Service) -> Endpoint:
    """The endpoint that says whether a service takes requests, and what its sessions take."""

    async def endpoint(request: Request) -> Response:
        content: dict[str, object] = {
            "status": "ending" if service.is_ending else "ok",
            "active": service.engine.active,
        }
        if service.sessions is not None:
            stats = service.sessions.stats()
            content["sessions"] = {
                "states": stats.sessions,
                "bytes": stats.memory_bytes,
                "disk_bytes": stats.disk_bytes,
            }
        return JSONResponse(content, 503 if service.is_ending else 200)

    return endpoint


def metrics(service: Service) -> Endpoint:
    """The endpoint with all numbers of a service."""

    async def endpoint(request: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return endpoint
