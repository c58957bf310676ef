"""Errors of requests, in the form that OpenAI's clients read."""

import logging
from typing import Any

from starlette.responses import JSONResponse

from ..errors import MMFreeError

_log = logging.getLogger(__name__)

_RATE_LIMIT = 429
_FIRST_SERVER_ERROR = 500


class RequestError(MMFreeError):
    """A request that is refused or has failed.

    Args:
        message: One line that names the parameter, the rule and the value.
        status: The status of HTTP.
        param: The parameter that the error is about.
        code: A word that programs can tell errors by.
        retry_after_s: Seconds after which a client may try again.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ):
        super().__init__(" ".join(message.split()))
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        kind = "invalid_request_error"
        if self.status == _RATE_LIMIT:
            kind = "rate_limit_error"
        elif self.status >= _FIRST_SERVER_ERROR:
            kind = "server_error"
        content = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": content}

    def response(self) -> JSONResponse:
        """The error as an answer."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return JSONResponse(self.body(), self.status, headers)


def ending_error() -> RequestError:
    """What a request is told that comes too late."""
    return RequestError(
        "[server] the server must be running but is ending.", 503, code="server_ending"
    )


def failure(error: Exception) -> RequestError:
    """What a client is told of an error while its answer was written.

    The library's own errors are shown as they are. Others are a fault of the server, whose words may
    hold what a client must not see.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, MMFreeError):
        return RequestError(str(error), 500, code="model_error")
    _log.error("A request failed.", exc_info=error)
    return RequestError(
        "[server] the model failed while it wrote the answer. The server's log has more.",
        500,
        code="model_error",
    )
