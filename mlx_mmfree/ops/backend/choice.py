"""Chooses between two ways to compute the same, by timing them on the device that computes.

A class of tasks is timed at its first use, on the arguments of that use, and the result is stored in the
library's cache folder. The first way is the default. It is chosen while a function is traced, where
nothing can be timed, until the class was timed elsewhere.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import mlx.core as mx

from ...errors import UsageError
from . import stored_results

ENVIRONMENT_VARIABLE = "MLX_MMFREE_PRODUCT"

DEFAULT = "default"
"""The name that forces the first way, whichever it is, so that nothing is timed."""

ON_METAL = ("groups", "tiles", "split", "mlx")
"""The ways in which Metal can compute a ternary product."""

NAMES = (DEFAULT, *ON_METAL)
"""The names that the environment variable can have."""

BUDGET = 0.001
"""About how many seconds a round of timing takes, unless one result takes longer."""

ROUNDS = 2

MOST_RUNS = 16

GAIN = 1.05
"""How many times as fast as the default the other must be, as timings vary."""

_SECTION = "choices"

_clock = time.perf_counter
_forced: ContextVar[str | None] = ContextVar("forced_candidate", default=None)
_chosen: dict[tuple[Any, ...], str] = {}


@contextmanager
def use(name: str) -> Iterator[None]:
    """Forces a way inside the `with` block; where there is none of this name, the default."""
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def untimed() -> Iterator[None]:
    """Forces the default inside the `with` block, but for a way that the environment names.

    Results then do not depend on what happened to be fastest.
    """
    with use(environment_candidate() or DEFAULT):
        yield


def forced() -> str | None:
    """The name that is forced by `use` or by the environment, or `None`.

    Raises:
        UsageError: The environment names no way.
    """
    return _forced.get() or environment_candidate()


def choose(
    operation: str,
    ways: tuple[str, str],
    run: Callable[[str], mx.array],
    x: mx.array,
    task: dict[str, Any],
    *,
    must_agree: bool,
) -> str:
    """Returns the name of the faster way for a class of tasks.

    Args:
        operation: The name of what they compute.
        ways: The names of both, the default first.
        run: Gives the results of a way, yet to be computed. It raises what MLX raises where that way
            cannot run; the default is chosen then, and nothing is stored.
        x: What the results depend on. Nothing is timed where it has no values because it is traced.
        task: Everything that tells the class from others, by names.
        must_agree: Leaves out the other way if its results differ from the default's.
    """
    key = (stored_results.device_name(), operation, *ways, *task.values())
    if key not in _chosen:
        with stored_results.LOCK:
            name = stored_results.variant_name(operation, task)
            known = stored_results.stored(_SECTION).get(name)
            chosen = known.get("chosen") if isinstance(known, dict) else None
            if chosen not in ways:
                if not _has_values(x):
                    return ways[0]
                chosen = _time(name, ways, run, must_agree)
            _chosen[key] = str(chosen)
    return _chosen[key]


def stored_choices() -> dict[str, dict[str, Any]]:
    """The choices on the default device so far, `chosen`, with the `seconds` of both ways."""
    with stored_results.LOCK:
        return dict(stored_results.stored(_SECTION))


@cache
def environment_candidate() -> str | None:
    """The way that the environment names when it is first asked, or `None`.

    Raises:
        UsageError: The environment names none.
    """
    name = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name is not None and name not in NAMES:
        raise UsageError(
            f"[environment] '{ENVIRONMENT_VARIABLE}' must be one of {', '.join(NAMES)} but got "
            f"{name!r:.40}. Name one of them, or unset it."
        )
    return name


def _one_round(run: Callable[[], mx.array]) -> float:
    """The time in which the device computes what `run` gives."""
    single = _seconds([run()])
    runs = min(int(BUDGET / max(single, 1e-9)), MOST_RUNS)
    return single if runs < 2 else min(single, _seconds([run() for _ in range(runs)]) / runs)


def _seconds(results: list[mx.array]) -> float:
    start = _clock()
    mx.eval(results)
    return _clock() - start


def _has_values(x: mx.array) -> bool:
    try:
        # what is yet to be computed is not timed
        mx.eval(x)
    except ValueError:
        return False
    return True


def _time(
    name: str, ways: tuple[str, str], run: Callable[[str], mx.array], must_agree: bool
) -> str:
    rounds: dict[str, list[float]] = {way: [] for way in ways}
    try:
        # this also compiles
        wanted, found = (run(way) for way in ways)
        mx.eval(wanted, found)
        if must_agree and not mx.array_equal(found, wanted, equal_nan=True):
            return ways[0]
        # by turns, because a GPU takes its time to reach its clock
        for _ in range(ROUNDS):
            for way in ways:
                rounds[way].append(_one_round(partial(run, way)))
    # what MLX raises when there is no memory, or a kernel fails
    except (RuntimeError, ValueError, MemoryError):
        return ways[0]
    default, other = (min(rounds[way]) for way in ways)
    chosen = ways[other * GAIN <= default]
    seconds = dict(zip(ways, (default, other), strict=True))
    stored_results.stored(_SECTION)[name] = {"chosen": chosen, "seconds": seconds}
    stored_results.store()
    return chosen
