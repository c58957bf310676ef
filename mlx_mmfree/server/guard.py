"""Who may call the server: by the name that it is called under, the page that calls, and a key."""

import hmac
import socket
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import RequestError

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
