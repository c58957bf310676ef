"""`/v1/models`: what the server offers."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..served import ServedModel
from ..service import Service
from .completions import Endpoint


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
