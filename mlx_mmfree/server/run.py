"""Runs the server until it is told to end."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence

import mlx.core as mx
import uvicorn

from ..generation.scheduling import Scheduler
from ..generation.sessions import Sessions
from .app import make_app
from .engine import Engine
from .errors import RequestError
from .metrics import Metrics
from .served import Catalogue, ServedModel
from .service import Service
from .settings import Settings

_LAST_WORDS_S = 5
"""Time in which streams say that they end, after the time of grace."""
_KEEP_ALIVE_S = 30
_WAITING_CONNECTIONS, _MOST_CONNECTIONS = 256, 1024


def make_service(
    models: Sequence[ServedModel], settings: Settings, sessions: Sessions | None = None
) -> Service:
    """A service of some models.

    Args:
        models: At least one, each with a name of its own. The first one answers requests that name none.
        settings: The limits and defaults.
        sessions: Those of all models, to be counted.
    """

    def make_scheduler(served: ServedModel) -> Scheduler:
        return Scheduler(
            served.model,
            served.tokenizer,
            max_rows=settings.max_rows,
            prefill_step_size=settings.prefill_step_size,
            sessions=served.sessions,
            draft_model=served.draft,
            num_draft_tokens=settings.num_draft_tokens,
        )

    for served in models:
        # what is computed on this thread cannot be waited for on that of the models
        mx.eval(served.model.state, [] if served.draft is None else served.draft.state)
    engine = Engine(models, make_scheduler)
    metrics = Metrics(lambda: engine.active, sessions)
    return Service(settings, Catalogue(models), engine, metrics, sessions)


def serve(service: Service, *, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM.

    Args:
        service: The models, and the limits.
        host: The address to listen at.
        port: The port; 0 takes a free one.
        announce: Called with the address once the server takes requests.

    Raises:
        OSError: The address cannot be listened at.
    """
    _log_to_stderr()
    config = uvicorn.Config(
        make_app(service),
        host=host,
        port=port,
        http="httptools",
        loop="uvloop",
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(service.settings.grace_s) + _LAST_WORDS_S,
        backlog=_WAITING_CONNECTIONS,
        limit_concurrency=_MOST_CONNECTIONS,
    )
    server = _Server(config, service, announce)
    with _listener(host, port) as listener:
        # uvicorn raises its signal once more when all is done
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            pass
        finally:
            signal.signal(signal.SIGTERM, before)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_WAITING_CONNECTIONS)


class _Server(uvicorn.Server):
    """Ends in three steps: no new requests, time for answers to end, an error for those that did not."""

    def __init__(self, config: uvicorn.Config, service: Service, announce: Callable[[str], None]):
        super().__init__(config)
        self._service = service
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if sockets and self.started:
            host, port, *_ = sockets[0].getsockname()
            self._announce(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.is_ending = True
        grace_s = self._service.settings.grace_s
        late = RequestError(
            f"[server] the answer must end within {grace_s:g} s since the server ends, but did not.",
            503,
            code="server_ending",
        )
        loop = asyncio.get_running_loop()
        timer = loop.call_later(grace_s, self._service.engine.end_all, late)
        await super().shutdown(sockets)
        timer.cancel()


def _log_to_stderr() -> None:
    """Sends the log of this package, and warnings of the HTTP server, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for name, level in ((__package__, logging.INFO), ("uvicorn", logging.WARNING)):
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.setLevel(level)
        log.propagate = False
