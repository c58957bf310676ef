"""Chooses among ways to compute the same, by timing them on the device that computes.

A class of tasks is timed at its first use, on the arguments of that use, and the result is kept in the
library's cache folder. The first candidate is the default. It is chosen while a function is traced,
where nothing can be timed, until the class was timed elsewhere.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, TypeVar

import mlx.core as mx

from ...errors import UsageError
from . import kept_results, launch

ENVIRONMENT_VARIABLE = "MLX_MMFREE_PRODUCT"

DEFAULT = "default"
"""The name that forces the first candidate, whichever it is, so that nothing is timed."""

ON_METAL = ("groups", "tiles", "split", "mlx")
"""The ways in which Metal can compute a ternary product."""

NAMES = (DEFAULT, *ON_METAL)
"""The names that the environment variable can have."""

GONE = ("two_bits", "five_trits")
"""Names that it could have while five trits a byte were multiplied as they are stored."""

BUDGET = 0.001
"""About how many seconds a round of timing a candidate takes, unless it computes for longer once."""

ROUNDS = 2

MOST_RUNS = 16

GAIN = 1.05
"""How many times as fast as the default a candidate must be, as timings vary."""

_SECTION = "choices"

_Result = TypeVar("_Result")

_clock = time.perf_counter
_forced: ContextVar[str | None] = ContextVar("forced_candidate", default=None)
_chosen: dict[tuple[Any, ...], str] = {}


@contextmanager
def use(name: str) -> Iterator[None]:
    """Forces a candidate inside the `with` block; where there is none of this name, the default."""
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def untimed() -> Iterator[None]:
    """Forces the default inside the `with` block, but for a candidate that the environment names.

    Results then do not depend on what happened to be fastest.
    """
    with use(environment_candidate() or DEFAULT):
        yield


def choose(
    operation: str,
    candidates: Sequence[str],
    others: Sequence[str],
    run: Callable[[str], mx.array],
    x: mx.array,
    *,
    task: dict[str, Any],
    facts: dict[str, Any],
    must_agree: bool,
) -> str:
    """Returns the name of the fastest candidate for a class of tasks.

    Args:
        operation: The name of what they compute.
        candidates: The names of those that are timed, the default first.
        others: The names of those that are only chosen where they are forced.
        run: Gives the results of a candidate, yet to be computed. It raises what MLX raises where a
            candidate cannot run, which leaves it out.
        x: What the results depend on. Nothing is timed where it has no values because it is traced.
        task: Everything that tells the class from others, by names.
        facts: What is kept beside the timings, values that JSON can hold.
        must_agree: Leaves out a candidate whose results differ from those of the default.

    Raises:
        UsageError: The environment names no candidate.
    """
    default = candidates[0]
    forced = _forced.get() or environment_candidate()
    if forced is not None:
        return forced if forced in (*candidates, *others) else default
    if len(candidates) == 1 or launch.is_recording():
        return default
    key = (kept_results.device_name(), operation, *candidates, *task.values())
    if key not in _chosen:
        with kept_results.LOCK:
            name = kept_results.variant_name(operation, task)
            known = kept_results.kept(_SECTION).get(name)
            chosen = known.get("chosen") if isinstance(known, dict) else None
            if chosen not in candidates:
                if not _has_values(x):
                    return default
                chosen = _time(name, candidates, run, facts, must_agree)
            _chosen[key] = str(chosen)
    return _chosen[key]


def kept_choices() -> dict[str, dict[str, Any]]:
    """What was chosen on the default device so far, `chosen`, with its facts and all `seconds`."""
    with kept_results.LOCK:
        return dict(kept_results.kept(_SECTION))


def forget() -> None:
    """Forgets all choices of the default device, also those that the cache folder keeps."""
    with kept_results.LOCK:
        _chosen.clear()
        kept_results.forget(_SECTION)


@cache
def environment_candidate() -> str | None:
    """The candidate that the environment names when it is first asked, or `None`.

    Raises:
        UsageError: The environment names no candidate.
    """
    name = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name in GONE:
        raise UsageError(
            f"[environment] '{ENVIRONMENT_VARIABLE}' must be one of {', '.join(NAMES)} but got "
            f"{name!r}, which is gone: five trits a byte are unpacked to 2 bits as they are read. "
            "Unset it."
        )
    if name is not None and name not in NAMES:
        raise UsageError(
            f"[environment] '{ENVIRONMENT_VARIABLE}' must be one of {', '.join(NAMES)} but got "
            f"{name!r:.40}."
        )
    return name


def _one_round(run: Callable[[], mx.array]) -> float:
    """The time in which the device computes what `run` gives."""
    once = _seconds([run()])
    runs = min(int(BUDGET / max(once, 1e-9)), MOST_RUNS)
    return once if runs < 2 else min(once, _seconds([run() for _ in range(runs)]) / runs)


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


def _sound(
    candidates: Sequence[str], run: Callable[[str], mx.array], must_agree: bool
) -> Iterator[str]:
    """The candidates that run, and whose results are those of the default where they must be."""

    def is_sound(candidate: str) -> bool:
        # this also compiles
        found = run(candidate)
        mx.eval(found)
        wanted.append(found)
        return not must_agree or bool(mx.array_equal(found, wanted[0], equal_nan=True))

    wanted: list[mx.array] = []
    for candidate in candidates:
        if _attempt(partial(is_sound, candidate)):
            yield candidate
        elif candidate == candidates[0]:
            return


def _attempt(compute: Callable[[], _Result]) -> _Result | None:
    """What is computed, or `None` if that fails."""
    try:
        return compute()
    # what MLX raises when there is no memory, or a kernel fails
    except (RuntimeError, ValueError, MemoryError):
        return None


def _time(
    name: str,
    candidates: Sequence[str],
    run: Callable[[str], mx.array],
    facts: dict[str, Any],
    must_agree: bool,
) -> str:
    default = candidates[0]
    rounds: dict[str, list[float]] = {each: [] for each in _sound(candidates, run, must_agree)}
    # by turns, because a GPU takes its time to reach its clock
    for _ in range(ROUNDS):
        for candidate in list(rounds):
            seconds = _attempt(partial(_one_round, partial(run, candidate)))
            if seconds is None:
                del rounds[candidate]
            else:
                rounds[candidate].append(seconds)
    timings = {candidate: min(found) for candidate, found in rounds.items()}
    if default not in timings:
        return default
    fastest = min(timings, key=lambda candidate: timings[candidate])
    chosen = fastest if timings[fastest] * GAIN <= timings[default] else default
    kept_results.kept(_SECTION)[name] = facts | {"chosen": chosen, "seconds": timings}
    kept_results.keep()
    return chosen
