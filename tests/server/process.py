"""A server in a process of its own."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.process_group import MMFREE, ROOT


class ServerProcess:
    """`mmfree serve` with some flags, at a free port, inside `with`.

    Args:
        flags: The flags, beside that of the port.
        environment: Further variables.

    Attributes:
        url: Where it listens.
        process: The process.
    """

    def __init__(self, *flags: str | Path, **environment: str):
        self.process = subprocess.Popen(
            [sys.executable, *MMFREE, "serve", "--port", "0", *map(str, flags)],
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

    @property
    def log(self) -> str:
        """What it has written to stderr, once it has ended."""
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
