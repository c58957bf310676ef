"""One line in the log for each request, without a word of its prompt."""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .metrics import Metrics

_log = logging.getLogger(__name__)
_LONGEST_PATH = 80
CLIENT_GONE = 499
"""The status of an answer that nobody waits for any more."""


class RequestLog:
    """Logs and counts what the server answers.

    Args:
        app: Answers.
        metrics: Counts.
        paths: The addresses that are counted apart.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]):
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        state = scope.setdefault("state", {})
        status = CLIENT_GONE
        is_complete = False

        async def seen(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                is_complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, seen)
        except Exception:
            # it is answered further out
            status, is_complete = 500, True
            raise
        finally:
            seconds = time.perf_counter() - started
            status = status if is_complete else CLIENT_GONE
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.seconds.labels(path).observe(seconds)
            _log.info("%s", _line(scope, status, seconds, state))


def _line(scope: Scope, status: int, seconds: float, state: dict[str, object]) -> str:
    path = ascii(scope["path"][:_LONGEST_PATH])[1:-1]
    words = [scope["method"], path, str(status)]
    words += [f"user {state['user']!a}"] if state.get("user") else []
    words += [str(state[name]) for name in ("model", "tokens", "error") if name in state]
    return ", ".join([" ".join(words[:3]), *words[3:], f"{seconds:.3f} s"])
