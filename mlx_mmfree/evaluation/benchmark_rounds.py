"""Times something and its limit in turn, so that both meet the same state of the machine."""

import time
from collections.abc import Callable

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
