"""The application: addresses, who may call them, and what errors look like."""

import hmac
import logging
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .endpoints import chat_completions, completions, embeddings, health, metrics, models, page
from .errors import RequestError, failure
from .metrics import CLIENT_GONE, RequestLog
from .service import Service

_OPEN_PATHS = ("/", "/health")


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
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        for name in ("Host", "Origin", "Authorization"):
            if len(headers.getlist(name)) > 1:
                raise RequestError(
                    f"[server] the header {name!r} must be given once but is given several times."
                )
        host = headers.get("host", "")
        name = _name_of(host)
        if not (name in self._hosts or _is_address(name)):
            raise RequestError(
                f"[server] 'Host' must be an address or a name of this server but is {host!r:.80}. "
                "Allow the name with --allowed-hosts.",
                403,
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        is_allowed = (
            origin is None
            or self._origins & {"*", origin}
            or _address_of(origin).lower() == host.lower()
        )
        if not is_allowed:
            raise RequestError(
                f"[server] 'Origin' must be this server's own page but is {origin!r:.80}. Allow "
                "another one with --allowed-origins.",
                403,
                code="origin_not_allowed",
            )
        if self._key is not None and scope["path"] not in _OPEN_PATHS:
            self._check_key(headers.get("authorization", ""))

    def _check_key(self, header: str) -> None:
        kind, _, given = header.partition(" ")
        assert self._key is not None
        # headers are read as Latin-1; it takes as long for a wrong key as for the right one
        is_right = hmac.compare_digest(given.strip().encode("latin-1"), self._key)
        if kind.lower() != "bearer" or not is_right:
            raise RequestError(
                "[server] the header 'Authorization' must be 'Bearer' and the server's key but is not.",
                401,
                code="invalid_api_key",
            )


def _name_of(host: str) -> str:
    """The name or address in the header `Host`, without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _address_of(origin: str) -> str:
    """The name and port in the header `Origin`; nothing if it names none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


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
