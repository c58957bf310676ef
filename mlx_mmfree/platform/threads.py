"""How many threads the CPU code may use, and threads that compute with MLX."""

import os
from threading import Thread

from .control_group import cpu_limit

MAX_THREADS = 256


def thread_count() -> int:
    """The number of threads for computing on the CPU, at most `MAX_THREADS`.

    As for OpenBLAS, the first of `OPENBLAS_NUM_THREADS` and `OMP_NUM_THREADS` that holds a positive
    number decides. Without one it is the number of cores that this process and its container may use.
    """
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        # OpenMP allows one number for each level of nesting
        number = os.environ.get(variable, "").split(",")[0].strip().lstrip("0")
        if number.isdecimal():
            # int refuses numbers of thousands of digits
            return min(int(number[: len(str(MAX_THREADS)) + 1]), MAX_THREADS)
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    limit = cpu_limit()
    return min(cores if limit is None else max(1, min(cores, int(limit))), MAX_THREADS)


class ComputingThread(Thread):
    """A thread that computes with MLX; whoever waits for it may end the program at once.

    MLX keeps the key of its random numbers and its compiled functions for each thread. It frees them
    when the thread of the system ends, which is after `join`, and takes Python's lock for it. A program
    that ends meanwhile dies by SIGABRT. So they are freed before.
    """

    def run(self) -> None:
        # commands that only ask for the number of threads do not load MLX
        import mlx.core as mx

        try:
            super().run()
        finally:
            # nothing can be computed in this thread after that
            mx.clear_streams()
