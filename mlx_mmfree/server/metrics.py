"""Numbers of a running server, in the text format of Prometheus, and its log."""

import logging
import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..generation.sessions import Sessions

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The metrics of a server, so far and now.

    Args:
        active: How many texts are under way or wait.
        sessions: What is kept; `None` if nothing is.
    """

    def __init__(self, active: Callable[[], int], sessions: Sessions | None):
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "mmfree_requests",
            "Requests by path and status",
            ("path", "status"),
            registry=self._registry,
        )
        self.seconds = Histogram(
            "mmfree_request_seconds",
            "Time from a request to the end of its answer",
            ("path",),
            registry=self._registry,
            buckets=_SECONDS,
        )
        self.first_token = self._histogram("mmfree_first_token_seconds", "Time to the first token")
        self.prompt_tokens = self._counter("mmfree_prompt_tokens", "Tokens of prompts")
        self.cached_tokens = self._counter(
            "mmfree_cached_tokens", "Tokens of prompts found in a cache"
        )
        self.generated_tokens = self._counter("mmfree_generated_tokens", "Tokens written")
        gauge = Gauge("mmfree_active_texts", "Texts under way or waiting", registry=self._registry)
        gauge.set_function(active)
        if sessions is not None:
            self._registry.register(_SessionNumbers(sessions))

    def _counter(self, name: str, description: str) -> Counter:
        return Counter(name, description, registry=self._registry)

    def _histogram(self, name: str, description: str) -> Histogram:
        return Histogram(name, description, registry=self._registry, buckets=_SECONDS)

    def text(self) -> bytes:
        """All numbers."""
        return generate_latest(self._registry)


class _SessionNumbers:
    """Counts sessions where they are asked for."""

    def __init__(self, sessions: Sessions):
        self._sessions = sessions

    def collect(self) -> Iterable[Metric]:
        stats = self._sessions.stats()
        gauges = {
            "mmfree_sessions": ("States kept", stats.sessions),
            "mmfree_session_memory_bytes": ("Bytes of those in memory", stats.memory_bytes),
            "mmfree_session_disk_bytes": ("Bytes of those on the disk", stats.disk_bytes),
        }
        counters = {
            "mmfree_session_hits": ("Prompts with a known prefix", stats.hits),
            "mmfree_session_misses": ("Prompts without one", stats.misses),
            "mmfree_session_tokens_saved": ("Tokens found in a cache", stats.tokens_saved),
            "mmfree_session_lost": ("States that the disk did not get", stats.lost),
            "mmfree_session_damaged": ("Files removed as damaged", stats.damaged),
        }
        return [
            *(GaugeMetricFamily(name, *each) for name, each in gauges.items()),
            *(CounterMetricFamily(name, *each) for name, each in counters.items()),
        ]


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
            shown = ascii(scope["path"][:_LONGEST_PATH])[1:-1]
            words = [f"{scope['method']} {shown} {status}"]
            words += [f"user {state['user']!a}"] if state.get("user") else []
            words += [str(state[name]) for name in ("model", "tokens", "error") if name in state]
            _log.info("%s", ", ".join([*words, f"{seconds:.3f} s"]))
