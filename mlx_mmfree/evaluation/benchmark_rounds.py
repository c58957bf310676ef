"""Times something and its limit in turn, so that both meet the same state of the machine."""

import time
from collections.abc import Callable
from typing import NamedTuple

Seconds = tuple[float, ...]


def in_turn(
    rounds: int, limit: Callable[[], float], own: Callable[[], float]
) -> tuple[Seconds, Seconds]:
    """Measures both in every round, the limit first.

    One more round comes before and does not count: it starts threads, touches pages and lets layers
    arrange their weights.

    Args:
        rounds: Number of rounds that count.
        limit: Returns the seconds of the limit.
        own: Returns the seconds of what is measured.

    Returns:
        The seconds of what is measured and of the limit, for each round.
    """
    times = []
    for _ in range(rounds + 1):
        limit_seconds = limit()
        times.append((own(), limit_seconds))
    own_times, limit_times = zip(*times[1:], strict=True)
    return own_times, limit_times


def elapsed(compute: Callable[[], object]) -> float:
    """The seconds that a function takes."""
    start = time.perf_counter()
    compute()
    return time.perf_counter() - start


class Elapsed(NamedTuple):
    """How long something took.

    Attributes:
        seconds: By the clock.
        processor_seconds: Of all threads of this process, which other programs hardly change.
    """

    seconds: float
    processor_seconds: float


def elapsed_both(compute: Callable[[], object]) -> Elapsed:
    """The time that a function takes, by the clock and of the processors."""
    start = time.perf_counter(), time.process_time()
    compute()
    return Elapsed(time.perf_counter() - start[0], time.process_time() - start[1])
