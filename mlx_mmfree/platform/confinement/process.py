"""The program's side: starts a confined process, asks it, and ends it at its limits.

The package `multiprocessing` limits neither time nor memory, and its processes import the program.
"""

import json
import marshal
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain
from multiprocessing.connection import wait
from pathlib import Path
from threading import Lock
from typing import Any

from .chunks import Builder, chunks
from .frames import MOST_BYTES, receive, send

# A limit of time on the clock, for a process that is stopped or swaps and so uses no processor time.
PATIENCE_S = 120.0
_POLL_S = 0.2
_PASSED_VARIABLES = ("DYLD_LIBRARY_PATH", "LD_LIBRARY_PATH", "TZ")
_SHARE_OF_REQUEST = 4
_LOOP = f"{__package__}.loop"

# Makes stand-ins for the packages above the modules, so that importing these runs no other code.
_START = """
import importlib, json, sys, types
start = json.loads(sys.argv[1])
sys.path += start["path"]
for name, folders in start["packages"].items():
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = folders
loop, module = (importlib.import_module(start[name]) for name in ("loop", "module"))
loop.serve(module.handle, start["memory_bytes"])
"""


class LimitError(Exception):
    """The confined code went beyond its limits, or its process ended. The message says which."""


class TimeLimitError(LimitError):
    """The confined code took more processor time than it may."""


class ConfinedProcess:
    """A Python process that serves one module's `handle` with limits on time and memory.

    The process starts with the first request and stays for the next ones. It ends with this object, with
    the program, and whenever a request goes beyond a limit. The next request then starts another one.
    Any thread may ask, and one request runs at a time. A forked program begins without a process.

    On Linux the kernel refuses memory beyond the limit. On other systems the resident size is checked
    several times a second.

    Args:
        module: The full name of a module with a function `handle`, which takes a request and returns a
            dictionary, both of plain data.
        packages: The names of the installed packages that the module imports.
        memory_bytes: The memory that a request may use.
        first: Gives a request that each new process is asked first, so that branches know its answer.
    """

    def __init__(
        self,
        module: str,
        packages: tuple[str, ...],
        memory_bytes: int,
        first: Callable[[], Any] | None = None,
    ) -> None:
        self._module = module
        self._packages = packages
        self._memory_bytes = memory_bytes
        self._base_bytes = 0
        self._first = first
        self._lock = Lock()
        self._running: _Running | _Forked | None = None
        self._left: deque[int] = deque()
        self.watches_memory = not sys.platform.startswith("linux")
        _confined.add(self)

    @property
    def process_id(self) -> int | None:
        """The number of the running process; `None` if there is none."""
        return None if self._running is None else self._running.process_id

    def ask(
        self, request: Any, cpu_seconds: float, tell: Callable[[Any], Any] | None = None
    ) -> dict[str, Any]:
        """The module's answer to a request.

        Args:
            request: Plain data.
            cpu_seconds: The processor time that the answer may take.
            tell: Answers what the module asks back meanwhile, in plain data.

        Raises:
            LimitError: The answer took too long or too much memory, or the process ended.
        """

        def exchange(connection: socket.socket) -> dict[str, Any]:
            self._give(connection, request, cpu_seconds)
            answer = self._answer(connection)
            while tell is not None and "asked" in answer:
                send(connection, marshal.dumps(tell(answer["asked"])))
                answer = self._answer(connection)
            return answer

        return self._exchanged(exchange, cpu_seconds)

    def branch(self, memory_bytes: int) -> "Branch":
        """A fork, which goes on from what the process is by now.

        Args:
            memory_bytes: The memory that a request of the fork may use beyond what it begins with.

        Raises:
            LimitError: It cannot be made.
        """
        left = [self._left.popleft() for _ in range(len(self._left))]
        ours, theirs = socket.socketpair()

        def exchange(connection: socket.socket) -> dict[str, Any]:
            send(connection, marshal.dumps(("branch", memory_bytes, left)))
            socket.send_fds(connection, [b"."], [theirs.fileno()])
            return self._answer(connection)

        with theirs:
            try:
                process_id = self._exchanged(exchange, PATIENCE_S)["process"]
            except BaseException:
                ours.close()
                raise
        base = _resident_bytes(self.process_id) if self.watches_memory else 0
        forked = _Forked(process_id, ours, self._left, self._end_of)
        return Branch(self._module, forked, memory_bytes, base)

    def _end_of(self, process_id: int) -> int | None:
        """Ends a branch, and says with which status it ended if that is known."""

        def exchange(connection: socket.socket) -> dict[str, Any]:
            send(connection, marshal.dumps(("end", process_id)))
            return self._answer(connection)

        # with a process, the record of what it forked is gone
        if self._running is None or self._running.has_ended():
            return None
        with suppress(LimitError):
            status: int | None = self._exchanged(exchange, PATIENCE_S)["status"]
            return status
        return None

    def _exchanged(
        self, exchange: Callable[[socket.socket], dict[str, Any]], cpu_seconds: float
    ) -> dict[str, Any]:
        with self._lock:
            try:
                answer = exchange(self._connected())
            except (EOFError, ConnectionError) as error:
                raise self._why_it_ended(cpu_seconds) from error
            except TimeoutError as error:
                self._end()
                raise LimitError("its process does not answer") from error
            except BaseException:
                self._end()
                raise
            if "failure" in answer:
                self._end()
                raise LimitError(self._why_it_failed(answer))
        return answer

    def close(self) -> None:
        """Ends the process; a later request starts another."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Leaves the process to the program that forked this one."""
        self._lock = Lock()
        if self._running is not None:
            self._running.forget()
            self._running = None

    def _connected(self) -> socket.socket:
        if self._running is not None and self._running.has_ended():
            self._end()
        if self._running is None:
            self._left.clear()
            self._running = _Running(self._start_values())
            # the first answer says that the process has imported everything
            answer = self._answer(self._running.connection)
            if self._first is not None:
                self._give(self._running.connection, self._first(), PATIENCE_S)
                answer = self._answer(self._running.connection)
            if "failure" in answer:
                raise LimitError(self._why_it_failed(answer))
        return self._running.connection

    def _give(self, connection: socket.socket, request: Any, cpu_seconds: float) -> None:
        """Sends a request, a large one in chunks: other threads run between them."""
        size = 0
        last: tuple[str, Any] | None = None
        for chunk in chain(chunks(request), [None]):
            if last is not None:
                frame = ("take", last) if chunk else ("ask", cpu_seconds, last)
                # marshal goes to the process only; its answers are JSON, which can hold nothing but data
                data = marshal.dumps(frame)
                size += len(data)
                if size > self._memory_bytes // _SHARE_OF_REQUEST:
                    raise LimitError(f"it is given over {size // 2**20} MB, which is too much")
                send(connection, data)
            last = chunk

    def _start_values(self) -> str:
        names: list[str] = []
        for module in (_LOOP, self._module):
            parts = module.split(".")
            names += [".".join(parts[:count]) for count in range(1, len(parts))]
        return json.dumps(
            {
                "loop": _LOOP,
                "module": self._module,
                "packages": {name: list(sys.modules[name].__path__) for name in names},
                "path": sorted(set(map(_folder_of, self._packages))),
                "memory_bytes": self._memory_bytes,
            }
        )

    def _answer(self, connection: socket.socket) -> dict[str, Any]:
        answer = self._received(connection)
        if "chunk" not in answer:
            return answer
        # other threads run between the chunks of a large one
        builder = Builder()
        while (chunk := answer["chunk"]) is not None:
            builder.add(chunk)
            answer = self._received(connection)
        whole: dict[str, Any] = builder.value
        return whole

    def _received(self, connection: socket.socket) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while not wait([connection], _POLL_S):
            if time.monotonic() > deadline:
                raise TimeoutError
            if self.watches_memory and self._grew_too_much():
                raise LimitError(self._too_much_memory())
        text = receive(connection, MOST_BYTES).decode("utf-8", "surrogatepass")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _grew_too_much(self) -> bool:
        return _resident_bytes(self.process_id) > self._base_bytes + self._memory_bytes

    def _why_it_failed(self, answer: dict[str, Any]) -> str:
        if answer["failure"] == "MemoryError":
            return self._too_much_memory()
        return f"{answer['failure']}: {answer['message']}"

    def _too_much_memory(self) -> str:
        return f"it takes over {self._memory_bytes // 2**20} MB of memory"

    def _why_it_ended(self, cpu_seconds: float) -> LimitError:
        status = self._end(gently=True)
        if status == -signal.SIGPROF:
            return TimeLimitError(f"it runs for over {cpu_seconds:g} seconds")
        if status == -signal.SIGABRT:
            # native code does not raise where it gets no memory
            megabytes = self._memory_bytes // 2**20
            return LimitError(
                f"its process was ended by SIGABRT, as where {megabytes} MB of memory do not suffice"
            )
        if status is not None and status < 0:
            return LimitError(f"its process was ended by {signal.Signals(-status).name}")
        return LimitError(f"its process ended with status {status}")

    def _end(self, gently: bool = False) -> int | None:
        running, self._running = self._running, None
        return None if running is None else running.end(gently)


class Branch(ConfinedProcess):
    """The result of `ConfinedProcess.branch`. It is not started again once it has ended."""

    def __init__(self, module: str, forked: "_Forked", memory_bytes: int, base_bytes: int) -> None:
        super().__init__(module, (), memory_bytes)
        self._base_bytes = base_bytes
        self._running = self._forked = forked

    def interrupt(self) -> None:
        """Lets a request fail that another thread waits for."""
        with suppress(OSError):
            self._forked.connection.shutdown(socket.SHUT_RDWR)

    def _connected(self) -> socket.socket:
        if self._running is None:
            raise LimitError("its process has ended")
        return self._running.connection


class _Running:
    """One process and the socket to it; it ends with this object or with the program."""

    def __init__(self, start_values: str) -> None:
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(PATIENCE_S)
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-B", "-c", _START, start_values],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env={
                        name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ
                    },
                    start_new_session=True,
                )
            except OSError as error:
                self.connection.close()
                raise LimitError(f"no process of its own can be started: {error}") from error
        self._finish = weakref.finalize(self, _finish, self.process, self.connection)

    @property
    def process_id(self) -> int:
        return self.process.pid

    def has_ended(self) -> bool:
        """Returns whether it has ended by itself."""
        return self.process.poll() is not None

    def end(self, gently: bool) -> int | None:
        """Ends the process and returns its status; `gently` first waits for it to end by itself."""
        if gently:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE_S)
        self._finish()
        return self.process.returncode

    def forget(self) -> None:
        """Closes this program's end of the socket and leaves the process alone."""
        self._finish.detach()
        self.connection.close()
        # the process is not a child of this program, so there is nothing to wait for
        self.process.returncode = 0


def _finish(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


class _Forked:
    """A process that another confined one has forked, and the socket to it.

    It ends with this object too, at the latest when it has used its time.

    Args:
        process_id: Its number.
        connection: The socket.
        left: Takes the number where nobody asks for the status.
        end_of: Ends the process and gives its status.
    """

    def __init__(
        self,
        process_id: int,
        connection: socket.socket,
        left: deque[int],
        end_of: Callable[[int], int | None],
    ) -> None:
        connection.settimeout(PATIENCE_S)
        self.process_id = process_id
        self.connection = connection
        self._end_of = end_of
        self._finish = weakref.finalize(self, _close, process_id, connection, left)

    def has_ended(self) -> bool:
        """The same as for `_Running`; a request finds out."""
        return False

    def end(self, gently: bool) -> int | None:
        """The same as for `_Running`. What ends it now changes no status of an end before."""
        self.forget()
        return self._end_of(self.process_id)

    def forget(self) -> None:
        """The same as for `_Running`."""
        self._finish.detach()
        self.connection.close()


def _close(process_id: int, connection: socket.socket, left: deque[int]) -> None:
    connection.close()
    left.append(process_id)


def _resident_bytes(process_id: int | None) -> int:
    command = ["ps", "-o", "rss=", "-p", str(process_id)]
    shown = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return int(shown) * 1024 if shown.isdigit() else 0


def _folder_of(package: str) -> str:
    """The folder from which a package is imported."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return str(Path(spec.origin).parents[1])


_confined: "weakref.WeakSet[ConfinedProcess]" = weakref.WeakSet()


def _forget_all() -> None:
    for confined in list(_confined):
        confined.forget()


os.register_at_fork(after_in_child=_forget_all)
