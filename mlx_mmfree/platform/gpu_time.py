"""How long a GPU takes for work that is queued, without what Python takes to describe it."""

from collections import deque
from collections.abc import Callable, Sequence
from math import ceil
from time import perf_counter

import mlx.core as mx

LEAST_SECONDS = 0.05
"""How long a measurement takes at least. In shorter ones, a GPU does not reach its full clock."""

_MOST_PASSES = 256

Build = Callable[[], Sequence[mx.array]]


def queued_seconds(build: Build) -> float:
    """The seconds of one pass of computations, measured over a queue of many passes.

    One pass comes before and does not count: it compiles kernels and wakes the GPU. All graphs are built
    before the clock starts. Computations of a pass that do not depend on each other may overlap.

    Args:
        build: Returns arrays that are yet to be computed, those of one pass. It is called for each.
    """
    one = _seconds(build, 1)
    passes = min(max(ceil(LEAST_SECONDS / one), 1), _MOST_PASSES)
    return _seconds(build, passes) / passes


def _seconds(build: Build, passes: int) -> float:
    queue = deque(list(build()) for _ in range(passes))
    mx.synchronize()
    start = perf_counter()
    while queue:
        # what is popped is freed as soon as it is computed
        mx.async_eval(queue.popleft())
    mx.synchronize()
    return perf_counter() - start
