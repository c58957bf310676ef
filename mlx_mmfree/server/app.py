"""The application: what each address does, who may call it, and what errors look like."""

import base64
import hmac
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from ipaddress import ip_address
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..generation.answers.completion import end_tokens
from ..generation.embeddings import embedding_steps, longest_text
from ..models.parts.embedder import embedding_use
from .answers import CompletionAnswer, ShownTokens
from .chat import chat_completions
from .errors import RequestError, failure
from .json_rows import json_response
from .messages import count_tokens, messages
from .metrics import CLIENT_GONE, RequestLog
from .page import PAGE, PAGE_HEADERS, page_files
from .responses import input_items, responses, stored_response
from .schemas import CompletionRequest, EmbeddingRequest
from .service import Endpoint, Service, while_connected
from .settings import MAX_CHOICES, MAX_EMBEDDED_TEXTS, MAX_EMBEDDED_TOKENS, ServedModel
from .texts import Prompt, check_size, checked_tokens, most_tokens, text_requests


def completions(service: Service) -> Endpoint:
    """The endpoint of a service."""

    def prepare(body: CompletionRequest) -> tuple[Any, ...]:
        served = service.catalogue.find(body.model, writes=True)
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
        answer = CompletionAnswer(served.name, texts, body.n, shown, body.stream_options)
        return served, texts, answer, body.stream

    async def endpoint(request: Request) -> Response:
        prepared = await service.prepared(request, CompletionRequest, prepare)
        return await service.answered(request, *prepared)

    return endpoint


def embedding_list(
    body: EmbeddingRequest, name: str, embeddings: np.ndarray, count: int
) -> dict[str, object]:
    """The answer to a request for embeddings of `count` tokens; its list is an iterator."""
    data = (
        {
            "object": "embedding",
            "index": index,
            "embedding": embedding.tolist()
            if body.encoding_format == "float"
            else base64.b64encode(embedding.astype("<f4").tobytes()).decode(),
        }
        for index, embedding in enumerate(embeddings)
    )
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": name, "usage": usage}


def _with_prompt(body: EmbeddingRequest, served: ServedModel) -> list[str | list[int]]:
    """The texts after the prompt that the request names, or that the model's files do."""
    try:
        prompt = embedding_use(served.model).prompt(body.prompt_name)
    except ValueError as error:
        sentence = str(error).replace("[embed]", "[request]")
        raise RequestError(sentence, param="prompt_name") from error
    if body.prompt_name is not None and not all(isinstance(text, str) for text in body.input):
        raise RequestError(
            "[request] 'prompt_name' must be left out where 'input' holds token ids, which are read as "
            "they are, but got both.",
            param="prompt_name",
        )
    return [prompt + text if isinstance(text, str) else text for text in body.input]


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
        if len(body.input) > MAX_EMBEDDED_TEXTS:
            raise RequestError(
                f"[request] 'input' must hold at most {MAX_EMBEDDED_TEXTS:,} texts but holds "
                f"{len(body.input):,}.",
                413,
                param="input",
            )
        inputs, allowed = _with_prompt(body, served), service.settings.max_context
        for text in inputs:
            check_size(served, [text], allowed, "a text of 'input'")
        check_size(served, inputs, MAX_EMBEDDED_TOKENS, "'input'")
        texts = [checked_tokens(served, text, "input") for text in inputs]
        longest, most = max(map(len, texts), default=0), longest_text(served.model)
        if most is not None and longest > most:
            raise RequestError(
                f"[request] a text of 'input' must have at most {most:,} tokens, as many as the model "
                f"was made for, but one has {longest:,}.",
                413,
                param="input",
                code="context_length_exceeded",
            )
        check_size(served, texts, MAX_EMBEDDED_TOKENS, "'input'")
        for text in texts:
            check_size(served, [text], allowed, "a text of 'input'")
        return body, served, texts, sum(map(len, texts))

    async def endpoint(request: Request) -> Response:
        body, served, texts, count = await service.prepared(request, EmbeddingRequest, prepare)
        service.check_capacity(1)
        size = service.settings.prefill_step_size
        steps = partial(embedding_steps, texts=texts, step_size=size)
        request.state.model = served.name
        request.state.tokens = f"{count} tokens read"
        work = service.engine.run_steps(served, steps, service.settings.timeout_s)
        vectors = await while_connected(request, work)
        return json_response(embedding_list(body, served.name, vectors, count))

    return endpoint


_MOST_LISTED = 1000


def models(service: Service) -> Endpoint:
    """The endpoint that lists all models of a service, or shows the one that is named.

    Each model, and the list, has the names of both vendors' formats.
    """
    created = int(time.time())

    def shown(served: ServedModel) -> dict[str, Any]:
        return {
            "id": served.name,
            "object": "model",
            "type": "model",
            "display_name": served.name,
            "created": created,
            "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "owned_by": "mlx_mmfree",
            "kind": served.kind,
            "chat_template": served.kind == "chat",
            "context_length": most_tokens(served, service.settings),
            "defaults": served.defaults(service.settings) if served.kind != "embedding" else {},
            "loaded": service.engine.is_loaded(served),
        }

    async def endpoint(request: Request) -> Response:
        name = request.path_params.get("name")
        if name is not None:
            return JSONResponse(shown(service.catalogue.find(name)))
        page, has_more = _page(list(service.catalogue), request.query_params)
        listed = {
            "object": "list",
            "data": [shown(served) for served in page],
            "has_more": has_more,
            "first_id": page[0].name if page else None,
            "last_id": page[-1].name if page else None,
        }
        return JSONResponse(listed)

    return endpoint


def _page(all: list[ServedModel], query: Mapping[str, str]) -> tuple[list[ServedModel], bool]:
    """The models of a page of the list, and whether it has more after them, or before `before_id`."""
    limit, names = query.get("limit"), [served.name for served in all]
    if limit is not None and not (
        re.fullmatch("[0-9]{1,4}", limit) and 1 <= int(limit) <= _MOST_LISTED
    ):
        raise RequestError(
            f"[request] 'limit' must be 1 to {_MOST_LISTED:,} but is {limit!r:.20}.", param="limit"
        )
    for name in ("after_id", "before_id"):
        if query.get(name, names[0]) not in names:
            raise RequestError(
                f"[request] {name!r} must be the id of a model but is {query[name]!r:.80}.",
                param=name,
            )
    begin = names.index(query["after_id"]) + 1 if "after_id" in query else 0
    end = names.index(query["before_id"]) if "before_id" in query else len(names)
    count = len(names) if limit is None else int(limit)
    if "before_id" in query:
        return all[max(begin, end - count) : end], end - count > begin
    return all[begin : begin + count], begin + count < end


async def page(request: Request) -> Response:
    """A file of the page."""
    name = request.path_params.get("name", PAGE)
    if name not in page_files():
        raise HTTPException(404)
    content, kind = page_files()[name]
    return Response(content, headers=dict(PAGE_HEADERS), media_type=kind)


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


_OPEN_PATHS, _OPEN_FOLDER = ("/", "/health"), "/page/"


class Guard:
    """Lets through requests that are allowed.

    A name in the header `Host` that is not the server's own shows a page that reached it by a name of
    its own making (DNS rebinding). The header `Origin` names the page that calls.

    Args:
        app: Gets what is let through.
        api_key: What requests must bring; `None` for nothing.
        hosts: Names under which the server may be called.
        origins: Origins of other pages that may call it; `"*"` for all.
    """

    def __init__(
        self, app: ASGIApp, api_key: str | None, hosts: Iterable[str], origins: Iterable[str]
    ):
        self._app = app
        # what the system hands over that is no UTF-8 is compared byte by byte
        self._key = None if api_key is None else api_key.encode("utf-8", "surrogateescape")
        own = socket.gethostname().lower()
        self._hosts = {"localhost", own, f"{own}.local", *(name.lower() for name in hosts)}
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except RequestError as error:
                await error.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        for name in ("Host", "Origin", "Authorization", "x-api-key"):
            if len(headers.getlist(name)) > 1:
                raise RequestError(
                    f"[server] the header {name!r} must be given once but is given several times."
                )
        host = headers.get("host")
        address = None if host is None else _address(host)
        if address is None and (host is not None or scope["http_version"] == "1.1"):
            raise RequestError(
                "[server] 'Host' must be a name or an address with or without a port but is "
                f"{'missing' if host is None else repr(host[:80])}."
            )
        if address is None or not self._is_own(address[0]):
            raise RequestError(
                f"[server] 'Host' must be an address or a name of this server but is {host!r:.80}. "
                "Allow the name with --allowed-hosts.",
                403,
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and not self._origins & {"*", origin}:
            scheme, _, rest = origin.partition("://")
            port = _PORTS.get(scheme.lower())
            caller = None if port is None else _address(rest)
            if caller is None or (caller[0], caller[1] or port) != (address[0], address[1] or port):
                raise RequestError(
                    f"[server] 'Origin' must be this server's own page but is {origin!r:.80}. Allow "
                    "another one with --allowed-origins.",
                    403,
                    code="origin_not_allowed",
                )
        path = scope["path"]
        is_open = path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)
        if self._key is not None and not is_open:
            self._check_key(headers.get("authorization", ""), headers.get("x-api-key", ""))

    def _is_own(self, name: str) -> bool:
        with suppress(ValueError):
            return name in self._hosts or bool(ip_address(name))
        return False

    def _check_key(self, header: str, other: str) -> None:
        kind, _, given = header.partition(" ")
        # headers are read as Latin-1; it takes as long for a wrong key as for the right one
        keys = [given if kind.lower() == "bearer" else "", other]
        assert self._key is not None
        right = [hmac.compare_digest(key.strip().encode("latin-1"), self._key) for key in keys]
        if not any(right):
            raise RequestError(
                "[server] the header 'Authorization' must be 'Bearer' and the server's key, or "
                "'x-api-key' the key, but neither is.",
                401,
                code="invalid_api_key",
            )


_ADDRESS = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?")
_PORTS = {"http": 80, "https": 443}


def _address(text: str) -> tuple[str, int | None] | None:
    """The name and the port of a server, as `Host` and `Origin` have them; `None` for anything else."""
    parts = _ADDRESS.fullmatch(text.lower())
    if parts is None or (parts[1] and ":" not in parts[1]) or int(parts[3] or 0) >= 2**16:
        return None
    return parts[1] or parts[2], None if parts[3] is None else int(parts[3])


_log = logging.getLogger(__name__)

_LONGEST_PATH = 100


def make_app(service: Service) -> Starlette:
    """The application of a service, which runs the service's engine while it runs itself."""
    settings = service.settings
    routes = [
        Route("/", page, methods=["GET"]),
        Route("/page/{name:path}", page, methods=["GET"]),
        Route("/health", health(service), methods=["GET"]),
        Route("/metrics", metrics(service), methods=["GET"]),
        Route("/v1/models", models(service), methods=["GET"]),
        Route("/v1/models/{name:path}", models(service), methods=["GET"]),
        Route("/v1/completions", completions(service), methods=["POST"]),
        Route("/v1/chat/completions", chat_completions(service), methods=["POST"]),
        Route("/v1/messages", messages(service), methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens(service), methods=["POST"]),
        Route("/v1/responses", responses(service), methods=["POST"]),
        Route("/v1/responses/{name}", stored_response(service), methods=["GET", "DELETE"]),
        Route("/v1/responses/{name}/input_items", input_items(service), methods=["GET"]),
        Route("/v1/embeddings", embeddings(service), methods=["POST"]),
    ]
    middleware = [
        Middleware(
            RequestLog, metrics=service.metrics, paths=frozenset(route.path for route in routes)
        ),
        # what answers the questions of other pages' browsers, none of which is allowed by default
        Middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        ),
        Middleware(Guard, api_key=settings.api_key, hosts=settings.hosts, origins=settings.origins),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.engine.start()
        try:
            yield
        finally:
            service.engine.stop()
            service.close()

    return Starlette(
        routes=routes,
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={
            HTTPException: _http_error,
            RequestError: _request_error,
            ClientDisconnect: _client_gone,
            Exception: _unforeseen,
        },
    )


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:_LONGEST_PATH]
    if error.status_code == 404:
        known = dict.fromkeys(route.path for route in request.app.routes)
        sentence = f"this server has no address {path!r}. It has {', '.join(known)}."
    elif error.status_code == 405:
        methods = (error.headers or {}).get("Allow", "")
        sentence = f"{path!r} takes the method {methods} but got {request.method}."
    else:
        sentence = f"{error.detail}."
    response = RequestError(f"[server] {sentence}", error.status_code).response(path)
    response.headers.update(error.headers or {})
    return response


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    request.state.error = error.code or "refused"
    return error.response(request.url.path)


async def _client_gone(request: Request, error: Exception) -> Response:
    # nobody reads it
    return Response(status_code=CLIENT_GONE)


async def _unforeseen(request: Request, error: Exception) -> Response:
    return failure(error).response(request.url.path)
