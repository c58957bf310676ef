"""Many runs, several at a time, of which finished ones are not repeated."""

import os
import signal
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

Run = TypeVar("Run")
Metrics = dict[str, Any]


class RunFailed(Exception):
    """A run ended with an error, or was stopped."""


def results_of(
    runs: Sequence[Run],
    finished: Callable[[Run], Metrics | None],
    train: Callable[[Run], Metrics],
    executor: Executor,
    line: Callable[[Run, Metrics], str],
) -> dict[Run, Metrics]:
    """The result of each run.

    Args:
        runs: The runs, those first that are to be trained first.
        finished: What a run came to before, if it is finished.
        train: Trains a run.
        executor: Trains those that are not finished, and is shut down at the end.
        line: What is printed about a run that has ended.
    """
    found = {run: metrics for run in runs if (metrics := finished(run)) is not None}
    missing = [run for run in dict.fromkeys(runs) if run not in found]
    with executor:
        started = {executor.submit(train, run): run for run in missing}
        try:
            for number, future in enumerate(as_completed(started), 1):
                run = started[future]
                found[run] = future.result()
                print(f"[{number} of {len(missing)}] {line(run, found[run])}", flush=True)
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise
    return found


def found_or_trained(
    runs: Sequence[Run],
    finished: Callable[[Run], Metrics | None],
    train: Callable[[Run], Metrics],
    line: Callable[[Run, Metrics], str],
    *,
    jobs: int,
    trains: bool,
) -> dict[Run, Metrics]:
    """Like `results_of`, with so many runs at a time; without `trains` only what is finished."""
    if not trains:
        return {run: metrics for run in runs if (metrics := finished(run)) is not None}
    return results_of(runs, finished, train, workers(jobs), line)


def workers(jobs: int) -> Executor:
    """So many processes, which end with this one."""
    return ProcessPoolExecutor(jobs, get_context("spawn"), _begin_worker)


def _begin_worker() -> None:
    # Ctrl-C ends a run at once and without words, since its parent has some
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def mean_and_spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean and, of several values, the standard deviation."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"
