"""How the server is, and the page at `/`."""

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from ..page import page_headers, page_text
from ..service import Service
from .completions import Endpoint


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
