"""Numbers of a running server, in the text form of Prometheus."""

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..generation.sessions import Sessions
from .answers.usage import Usage

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """What a server has done so far, and what it does now.

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
        self._first = self._histogram("mmfree_first_token_seconds", "Time to the first token")
        self._prompt = self._counter("mmfree_prompt_tokens", "Tokens of prompts")
        self._cached = self._counter("mmfree_cached_tokens", "Tokens of prompts not read again")
        self._written = self._counter("mmfree_generated_tokens", "Tokens written")
        gauge = Gauge("mmfree_active_texts", "Texts under way or waiting", registry=self._registry)
        gauge.set_function(active)
        if sessions is not None:
            self._registry.register(_SessionNumbers(sessions))

    def _counter(self, name: str, description: str) -> Counter:
        return Counter(name, description, registry=self._registry)

    def _histogram(self, name: str, description: str) -> Histogram:
        return Histogram(name, description, registry=self._registry, buckets=_SECONDS)

    def first_token(self, started: float) -> None:
        """Notes that a request of that moment, of `time.perf_counter`, has its first token."""
        self._first.observe(time.perf_counter() - started)

    def tokens(self, usage: Usage) -> None:
        """Counts what a request took."""
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._written.inc(usage.completion_tokens)

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
            "mmfree_session_hits": ("Prompts with a known beginning", stats.hits),
            "mmfree_session_misses": ("Prompts without one", stats.misses),
            "mmfree_session_tokens_saved": ("Tokens not read again", stats.tokens_saved),
            "mmfree_session_lost": ("States that the disk did not get", stats.lost),
            "mmfree_session_damaged": ("Files removed as damaged", stats.damaged),
        }
        return [
            *(GaugeMetricFamily(name, *each) for name, each in gauges.items()),
            *(CounterMetricFamily(name, *each) for name, each in counters.items()),
        ]
