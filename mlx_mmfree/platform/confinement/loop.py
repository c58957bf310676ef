"""The confined side: answers requests one by one, each within a limit of processor time.

This module and those it serves import only what they need, so that the process starts quickly. The
packages above them are empty stand-ins there, and their own code does not run.
"""

import json
import marshal
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .frames import receive, send

_MAX_MESSAGE = 300
_UNLIMITED = sys.maxsize


def serve(handle: Callable[[Any], Mapping[str, Any]], memory_bytes: int) -> None:
    """Answers requests from standard input's socket until the other side is gone.

    Args:
        handle: Makes the answer to a request, in plain data.
        memory_bytes: The memory that it may use beyond what the process has now, where the system can
            limit it.
    """
    # the other side handles Ctrl-C
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # the system ends a process whose timer fires, whatever the process is busy with
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=0)
    _be_silent()
    _limit(memory_bytes)
    with suppress(EOFError, OSError):
        send(connection, b"{}")
        while True:
            seconds, request = marshal.loads(receive(connection, _UNLIMITED))
            signal.setitimer(signal.ITIMER_PROF, seconds)
            answer = _answer(handle, request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(connection, answer)


def _answer(handle: Callable[[Any], Mapping[str, Any]], request: Any) -> bytes:
    """The answer as JSON, or the kind and message of the failure."""
    try:
        return _encoded(handle(request))
    except BaseException as error:
        message = str(error)[:_MAX_MESSAGE]
        return _encoded({"failure": type(error).__name__, "message": message})


def _encoded(answer: Mapping[str, Any]) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _be_silent() -> None:
    """Discards what libraries print."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    sizes = Path("/proc/self/statm")
    # on other systems the limit has no effect, and the other side watches the memory
    if sizes.exists():
        held = int(sizes.read_text().split()[0]) * resource.getpagesize()
        limit = held + memory_bytes
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
