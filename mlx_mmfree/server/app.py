"""The application: addresses, who may call them, and what errors look like."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from .endpoints.chat import chat_completions
from .endpoints.completions import completions
from .endpoints.embeddings import embeddings
from .endpoints.models import models
from .endpoints.status import health, metrics, page
from .errors import RequestError, failure
from .guard import Guard
from .request_log import CLIENT_GONE, RequestLog
from .service import Service

_log = logging.getLogger(__name__)

_LONGEST_PATH = 100


def make_app(service: Service) -> Starlette:
    """The application of a service, which runs the service's engine while it runs itself."""
    settings = service.settings
    routes = [
        Route("/", page, methods=["GET"]),
        Route("/health", health(service), methods=["GET"]),
        Route("/metrics", metrics(service), methods=["GET"]),
        Route("/v1/models", models(service), methods=["GET"]),
        Route("/v1/models/{name:path}", models(service), methods=["GET"]),
        Route("/v1/completions", completions(service), methods=["POST"]),
        Route("/v1/chat/completions", chat_completions(service), methods=["POST"]),
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
            allow_methods=["GET", "POST"],
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
    response = RequestError(f"[server] {sentence}", error.status_code).response()
    response.headers.update(error.headers or {})
    return response


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    request.state.error = error.code or "refused"
    return error.response()


async def _client_gone(request: Request, error: Exception) -> Response:
    # nobody reads it
    return Response(status_code=CLIENT_GONE)


async def _unforeseen(request: Request, error: Exception) -> Response:
    return failure(error).response()
