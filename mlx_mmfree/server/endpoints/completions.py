"""`/v1/completions`: continues prompts."""

from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...generation.stop import end_tokens
from ..answers.completion import CompletionAnswer
from ..answers.logprobs import ShownTokens
from ..prompts import Prompt, checked_tokens
from ..schemas.completion import CompletionRequest
from ..schemas.sampling import StreamOptions
from ..service import Service
from ..texts import text_requests

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


def completions(service: Service) -> Endpoint:
    """The endpoint of a service."""

    def prepare(body: CompletionRequest) -> tuple[Any, ...]:
        served = service.catalogue.find(body.model)
        prompts = [Prompt(ids) for ids in checked_tokens(served, body.prompt, "prompt")]
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
        answer = CompletionAnswer(served.name, len(texts), body.n, shown)
        return served, texts, answer, stream_options(body)

    async def endpoint(request: Request) -> Response:
        prepared = await service.prepared(request, CompletionRequest, prepare)
        return await service.answered(request, *prepared)

    return endpoint


def stream_options(body: Any) -> StreamOptions | None:
    """How an answer streams; `None` to send it whole."""
    return (body.stream_options or StreamOptions()) if body.stream else None
