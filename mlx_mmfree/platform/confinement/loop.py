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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..resident_memory import peak_resident_bytes
from .chunks import SIZE, Builder, chunks
from .frames import receive, send

_MAX_MESSAGE = 300
_UNLIMITED = sys.maxsize

Handle = Callable[[Any], Mapping[str, Any]]


class _Side:
    """The state of this process, which a branch of it has anew.

    Attributes:
        connection: To the program.
        most_bytes: The resident memory that it may reach; `None` where the kernel holds it to less.
        branches: Those that were not ended yet.
        given: What has come of a request.
    """

    connection: socket.socket
    most_bytes: int | None
    branches: set[int]
    given: Builder


def serve(handle: Handle, memory_bytes: int) -> None:
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
    _be_silent()
    _begin(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=0), memory_bytes)
    with suppress(EOFError, OSError):
        send(_Side.connection, b"{}")
        while True:
            kind, *values = marshal.loads(receive(_Side.connection, _UNLIMITED))
            frames = _answer(handle, *values) if kind == "ask" else [_DOES[kind](*values)]
            for frame in filter(None, frames):
                send(_Side.connection, frame)


def ask_back(question: Any) -> Any:
    """The program's answer, where a request cannot be answered without it."""
    send(_Side.connection, _encoded({"asked": question}))
    return marshal.loads(receive(_Side.connection, _UNLIMITED))


def _begin(connection: socket.socket, memory_bytes: int) -> None:
    _Side.connection = connection
    _Side.branches = set()
    _Side.given = Builder()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    # elsewhere it is looked at after each request, and by the other side during it
    is_limited = _limit(memory_bytes)
    _Side.most_bytes = None if is_limited else peak_resident_bytes() + memory_bytes


def _take(chunk: Sequence[Any]) -> bytes:
    """Keeps a chunk of a request, to which there is no answer yet."""
    _Side.given.add(chunk)
    return b""


def _answer(handle: Handle, seconds: float, last: Sequence[Any]) -> list[bytes]:
    """The answer as JSON, in chunks if it is large, or the kind and message of the failure.

    Args:
        handle: Makes it.
        seconds: The processor time that it may take.
        last: The last chunk of the request.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        given, _Side.given = _Side.given, Builder()
        given.add(last)
        answer = handle(given.value)
        frames = [_encoded(answer)]
        if len(frames[0]) > SIZE:
            frames = [_encoded({"chunk": chunk}) for chunk in chunks(dict(answer))]
            frames.append(_encoded({"chunk": None}))
        if _Side.most_bytes is not None and peak_resident_bytes() > _Side.most_bytes:
            raise MemoryError
        return frames
    except BaseException as error:
        message = str(error)[:_MAX_MESSAGE]
        return [_encoded({"failure": type(error).__name__, "message": message})]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _branch(memory_bytes: int, left: list[int]) -> bytes:
    """Ends branches that nobody needs any more, and forks another.

    That one goes on from here with a connection of its own, and may use so much memory beyond what it
    has then.
    """
    for process_id in left:
        _end(process_id)
    _, (descriptor,), *_ = socket.recv_fds(_Side.connection, 1, 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=descriptor) as connection:
        try:
            process_id = os.fork()
        except OSError as error:
            return _encoded({"failure": type(error).__name__, "message": str(error)})
        if process_id:
            _Side.branches.add(process_id)
            return _encoded({"process": process_id})
        _Side.connection.close()
        _begin(connection.dup(), memory_bytes)
        # nothing was asked of this one yet
        return b""


def _end(process_id: int) -> bytes:
    """Ends a branch, if it has not ended by itself, and tells its status."""
    if process_id not in _Side.branches:
        return _encoded({"status": None})
    _Side.branches.remove(process_id)
    os.kill(process_id, signal.SIGKILL)
    return _encoded({"status": os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])})


_DOES: Mapping[str, Callable[..., bytes]] = {"take": _take, "branch": _branch, "end": _end}


def _encoded(answer: Mapping[str, Any]) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _be_silent() -> None:
    """Discards what libraries print."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _limit(memory_bytes: int) -> bool:
    """Lets the kernel refuse more memory, if it can."""
    sizes = Path("/proc/self/statm")
    if not sizes.exists():
        return False
    used = int(sizes.read_text().split()[0]) * resource.getpagesize()
    limit = min(used + memory_bytes, sys.maxsize)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return True
