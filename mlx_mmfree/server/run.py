"""Runs the server until it is asked to end."""

import asyncio
import errno
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import mlx.core as mx
import uvicorn

from ..errors import UsageError
from ..generation.scheduling import Scheduler
from ..generation.sessions import Sessions
from .app import make_app
from .connection import Connection
from .engine.engine import Engine
from .engine.weights import Weights
from .errors import RequestError
from .metrics import Metrics
from .service import Service
from .settings import MOST_CONNECTIONS, Catalogue, ServedModel, Settings

_LAST_WORDS_S = 2.0
"""Time in which answers say that they end, after the time of grace."""
_AFTER_ALL_S = 10
"""Time after the time of grace in which everything has ended."""
_KEEP_ALIVE_S = 30
_WAITING_CONNECTIONS = 256
_OTHER_FILES = 512
"""Files that the process needs beside its connections."""
_TICKS_A_SECOND = 10
_SWITCH_S = 0.001


def make_service(
    models: Sequence[ServedModel | Weights],
    settings: Settings,
    sessions: Sessions | None = None,
    budget_bytes: int | None = None,
) -> Service:
    """A service of some models.

    Args:
        models: At least one, each with a name of its own: loaded, or to be loaded when they are asked
            for. The first one answers requests that name none.
        settings: The limits and defaults.
        sessions: The sessions of all models, to be counted.
        budget_bytes: What the weights in memory may need together; `None`: any number.
    """

    def make_scheduler(served: ServedModel) -> Scheduler:
        return Scheduler(
            served.model,
            served.tokenizer,
            max_rows=settings.max_rows,
            prefill_step_size=settings.prefill_step_size,
            sessions=served.sessions,
            draft_model=served.draft,
            ngram_drafts=settings.ngram_drafts,
            num_draft_tokens=settings.num_draft_tokens,
        )

    weights = [each if isinstance(each, Weights) else Weights([each]) for each in models]
    known = [served for each in weights for served in each.models]
    # adapters have the tokenizer of their model, and so one process for it
    tokenizers = {id(served.tokenizer): served.tokenizer.for_threads() for served in known}
    for each in weights:
        each.models = [
            replace(served, tokenizer=tokenizers[id(served.tokenizer)]) for served in each.models
        ]
        for served in each.models if each.is_loaded else ():
            # what is computed on this thread cannot be waited for on the models' thread
            mx.eval(served.model.state, [] if served.draft is None else served.draft.state)
    engine = Engine(weights, make_scheduler, budget_bytes)
    metrics = Metrics(lambda: engine.active, sessions)
    catalogue = Catalogue([served for each in weights for served in each.models])
    return Service(settings, catalogue, engine, metrics, sessions)


def serve(service: Service, *, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM.

    Args:
        service: The models, and the limits.
        host: The address to listen at.
        port: The port; 0 takes a free one.
        announce: Called with the address once the server takes requests.

    Raises:
        UsageError: Another program listens at the port.
        OSError: The address cannot be listened at.
    """
    _log_to_stderr()
    connections: set[Connection] = set()
    # uvicorn only calls it
    protocol: Any = partial(Connection, opened=connections, most=_most_connections())
    config = uvicorn.Config(
        make_app(service),
        host=host,
        port=port,
        http=protocol,
        loop="uvloop",
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(service.settings.grace_s) + _AFTER_ALL_S,
        backlog=_WAITING_CONNECTIONS,
    )
    server = _Server(config, service, connections, announce)
    # each step of an answer may wait so long for a thread that computes in Python
    sys.setswitchinterval(_SWITCH_S)
    # all threads wait while the collector looks through what lives, most of which stays for good
    gc.collect()
    gc.freeze()
    with _listener(host, port) as listener:
        # uvicorn raises its signal once more when all is done
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            pass
        finally:
            signal.signal(signal.SIGTERM, before)


def _most_connections() -> int:
    """How many connections the system lets the process have open, and the server takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_CONNECTIONS
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(soft - _OTHER_FILES, soft // 2)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_WAITING_CONNECTIONS)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        free = _next_free_port(host, port, family)
        other = "0 takes a free one" if free is None else f"--port {free} is free"
        raise UsageError(
            f"[serve] 'port' must be free but another program listens at {host}:{port}; {other}."
        ) from None


def _next_free_port(host: str, port: int, family: socket.AddressFamily) -> int | None:
    """The first of the next hundred ports at which nobody listens; `None` if there is none."""
    for other in range(port + 1, min(port + 101, 65_536)):
        try:
            socket.create_server((host, other), family=family).close()
        except OSError:
            continue
        return other
    return None


class _Server(uvicorn.Server):
    """Ends in three steps: no new requests, time for answers to end, an error for those that did not.

    A second signal ends the time at once.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        connections: set[Connection],
        announce: Callable[[str], None],
    ):
        super().__init__(config)
        self._service = service
        self._connections = connections
        self._announce = announce
        self._is_hurried = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if sockets and self.started:
            host, port, *_ = sockets[0].getsockname()
            self._announce(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_A_SECOND == 0:
            for connection in list(self._connections):
                connection.end_if_late()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)
        elif self._loop is not None and not self._is_hurried:
            self._is_hurried = True
            self._loop.call_soon_threadsafe(self._end_answers)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.begin_to_end()
        grace_s = 0 if self._is_hurried else self._service.settings.grace_s
        timer = asyncio.get_running_loop().call_later(grace_s, self._end_answers)
        await super().shutdown(sockets)
        timer.cancel()

    def _end_answers(self) -> None:
        """Tells all who still wait that the server ends, and leaves those who do not read it."""
        self._service.engine.end_all(
            RequestError(
                "[server] the answer must end before the server does but did not.",
                503,
                code="server_ending",
            )
        )
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._abort_all)

    def _abort_all(self) -> None:
        for connection in list(self._connections):
            connection.abort()


def _log_to_stderr() -> None:
    """Sends the log of this package, and warnings of the HTTP server, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for name, level in ((__package__, logging.INFO), ("uvicorn", logging.WARNING)):
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.setLevel(level)
        log.propagate = False
