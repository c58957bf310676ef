"""Errors of requests, in the format that the clients of each address read."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from ..errors import MMFreeError

_log = logging.getLogger(__name__)

_RATE_LIMIT = 429
_FIRST_SERVER_ERROR = 500
ANTHROPIC = "/v1/messages"
"""The prefix of the addresses whose errors have Anthropic's format; all others have OpenAI's."""
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


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

    def renamed(self, names: Mapping[str, str]) -> "RequestError":
        """The same error with other names of parameters."""

        def name(found: re.Match[str]) -> str:
            return f"'{names.get(found[1], found[1])}'"

        message = re.sub(r"'(\w+)'", name, str(self))
        param = self.param if self.param is None else names.get(self.param, self.param)
        return RequestError(
            message, self.status, param=param, code=self.code, retry_after_s=self.retry_after_s
        )

    def body(self, path: str = "") -> dict[str, Any]:
        """The error as JSON, in the format of an address."""
        if path.startswith(ANTHROPIC):
            usual = "api_error" if self.status >= _FIRST_SERVER_ERROR else "invalid_request_error"
            kind = _ANTHROPIC_KINDS.get(self.status, usual)
            reported: dict[str, Any] = {"type": kind, "message": str(self)}
            if self.param == "thread":
                # by this clients know to send the conversation itself
                reported["details"] = {"error_code": "thread_unsupported_request"}
            return {"type": "error", "error": reported}
        kind = "invalid_request_error"
        if self.status == _RATE_LIMIT:
            kind = "rate_limit_error"
        elif self.status >= _FIRST_SERVER_ERROR:
            kind = "server_error"
        content = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": content}

    def response(self, path: str = "") -> JSONResponse:
        """The error as an answer, in the format of an address."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return JSONResponse(self.body(path), self.status, headers)


def ending_error() -> RequestError:
    """The error for a request that comes too late."""
    return RequestError(
        "[server] the server must be running but is ending.", 503, code="server_ending"
    )


def failure(error: Exception) -> RequestError:
    """The error that a client is reported while its answer is written.

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
