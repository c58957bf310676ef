"""A server in a process of its own."""

import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from tests.process_group import MMFREE, ROOT


class ServerProcess:
    """`mmfree serve` with some flags, at a free port, inside `with`.

    Args:
        flags: The flags, beside the port's.
        first: Python code that its process runs first, such as to make its limits small.
        environment: Further variables.

    Attributes:
        url: Where it listens.
        process: The process.
    """

    def __init__(self, *flags: str | Path, first: str = "", **environment: str):
        option, program = MMFREE
        self.process = subprocess.Popen(
            [
                sys.executable,
                option,
                f"{first}\n{program}",
                "serve",
                "--port",
                "0",
                *map(str, flags),
            ],
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._log: list[str] = []
        assert self.process.stdout is not None and self.process.stderr is not None
        # a pipe that nobody empties would stop the server
        self._reader = threading.Thread(target=self._log.extend, args=(self.process.stderr,))
        self._reader.start()
        self.greeting = self.process.stdout.readline()
        found = re.search(r"http://\S+", self.greeting)
        if found is None:
            self.end()
            raise AssertionError(f"The server does not start: {self.log}")
        self.url = found[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def connect(self) -> socket.socket:
        """A connection to it, which waits for 30 s at most."""
        address = urlsplit(self.url)
        assert address.hostname is not None
        return socket.create_connection((address.hostname, address.port), timeout=30)

    @property
    def resident_mb(self) -> float:
        """Its memory, in megabytes; 0 where the system does not say."""
        status = Path(f"/proc/{self.process.pid}/status")
        if not status.exists():
            return 0
        [line] = [line for line in status.read_text().splitlines() if line.startswith("VmRSS")]
        return int(line.split()[1]) / 1000

    @property
    def log(self) -> str:
        """Its stderr, once it has ended."""
        return "".join(self._log)

    def wait(self) -> int:
        """Waits for its end and returns its exit status."""
        status = self.process.wait(timeout=120)
        self._reader.join(timeout=60)
        return status

    def end(self) -> None:
        """Ends it if it is still running."""
        self.process.kill()
        self.process.wait()
        self._reader.join(timeout=60)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
