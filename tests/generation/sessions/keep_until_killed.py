"""A process that keeps sessions until it is killed, and prints which of them are on the disk."""

import os
import random
import signal
import sys
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

from mlx_mmfree.generation.sessions import Sessions
from mlx_mmfree.generation.storage import session_folder
from tests.generation.models import VOCABULARY, recurrent
from tests.generation.sessions.texts import keep

AHEAD = 8
"""Sessions that wait for the disk at most, so that writing never pauses."""

_write = session_folder.write_content


class DeadlyDisk:
    """Kills the process when a part of a file is written, once it was asked what is written.

    Args:
        number: How many files are written before that.

    Attributes:
        is_asked: Set by whoever asks.
    """

    def __init__(self, number: int):
        self._left = number
        self.is_asked = Event()

    def write(self, file: Path, *content: Any) -> None:
        """Takes the place of `write_content`."""
        _write(file, *content)
        self._left -= 1
        if self._left < 0:
            os.truncate(file, random.randrange(file.stat().st_size))
            # the first may have asked before
            for _ in range(2):
                self.is_asked.clear()
                self.is_asked.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def text(writer: int, number: int) -> list[int]:
    """The state that a writer keeps under a number."""
    return [writer, number % VOCABULARY, number // VOCABULARY, *[1] * (number % 5)]


def main(path: str, writer: int, files: int) -> None:
    disk = DeadlyDisk(files)
    if files:
        session_folder.write_content = disk.write
    model = recurrent(1)
    sessions = Sessions(model, memory_bytes=2**20, folder=path)
    reported = number = 0
    while True:
        while reported < number and sessions.is_on_disk(text(writer, reported)):
            print(reported, flush=True)
            reported += 1
        disk.is_asked.set()
        if number - reported < AHEAD:
            keep(sessions, model, text(writer, number))
            number += 1
        else:
            sleep(0.001)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
