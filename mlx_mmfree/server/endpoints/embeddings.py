"""`/v1/embeddings`: vectors of texts."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..answers.streams import while_connected
from ..embeddings import embedding_list, embedding_steps
from ..errors import RequestError
from ..prompts import check_size, checked_tokens
from ..schemas.embedding import EmbeddingRequest
from ..service import Service
from ..settings import MAX_CHOICES
from .completions import Endpoint


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
