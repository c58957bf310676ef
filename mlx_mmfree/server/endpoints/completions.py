"""`/v1/completions`: continues prompts."""

from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...generation.decode import end_tokens
from ..answers.completion import CompletionAnswer
from ..answers.logprobs import ShownTokens
from ..errors import RequestError
from ..prompts import Prompt, check_size, checked_tokens, most_tokens
from ..schemas.completion import CompletionRequest
from ..schemas.sampling import StreamOptions
from ..service import Service
from ..settings import MAX_CHOICES
from ..texts import text_requests

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
        return served, texts, answer, stream_options(body)

    async def endpoint(request: Request) -> Response:
        prepared = await service.prepared(request, CompletionRequest, prepare)
        return await service.answered(request, *prepared)

    return endpoint


def stream_options(body: Any) -> StreamOptions | None:
    """How an answer streams; `None` to send it whole."""
    return (body.stream_options or StreamOptions()) if body.stream else None
