"""Checks the kernels of a graph in a thread, while something else takes time."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from ...platform.threads import ComputingThread
from . import choice, dispatch
from .self_check import collecting


def check_early(build: Callable[[], object]) -> threading.Thread | None:
    """Checks the Metal kernels that a graph needs, so that their first use need not.

    What the graph needs is collected here, since MLX lets no thread compute the lazy arrays of another.
    The thread makes arrays of its own. Whatever fails is left to the first use, which says so.

    Args:
        build: Builds the graph. Nothing of it is computed.

    Returns:
        The thread that checks them, or `None` where there is no Metal or no kernel is asked for.
    """
    if dispatch.metal_unavailable() is not None or dispatch.forced_backend() not in (None, "metal"):
        return None
    # a model that cannot be run like this one is no reason not to load it
    with collecting() as checks, choice.use(choice.DEFAULT), suppress(Exception):
        build()
    if not checks:
        return None
    thread = ComputingThread(target=_run, args=(checks,), name="mlx_mmfree kernel checks")
    thread.start()
    return thread


def _run(checks: Sequence[Callable[[], object]]) -> None:
    for check in checks:
        # a process that ends does not wait for all of them
        if not threading.main_thread().is_alive():
            return
        with suppress(Exception):
            check()
