"""`python -m mlx_mmfree.cli.parts.launched PID COMMAND …`: a process of `mmfree launch`, PID."""

import os
import signal
import sys
import time
from threading import Thread

from .console import main

_PAUSE_S = 1.0


def _end_with(parent: int) -> None:
    """Asks this process to end once the one that has started it is gone."""
    while os.getppid() == parent:
        time.sleep(_PAUSE_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    _, launcher, *words = sys.argv
    Thread(target=_end_with, args=(int(launcher),), daemon=True).start()
    raise SystemExit(main(words))
