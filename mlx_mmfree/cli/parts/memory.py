"""The flags for MLX's memory limits, and what is set and said accordingly."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from .command import argument_errors
from .flags import gigabytes

if TYPE_CHECKING:
    from ...models import Decoder
    from ...training.memory import MemoryPlan


def add_memory_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    sizes: dict[str, Any] = {"type": gigabytes, "metavar": "GB"}
    group.add_argument(
        "--memory-margin",
        **sizes,
        help="how much the wired and the cache limit exceed the size of the model (4.29)",
    )
    group.add_argument(
        "--wired-limit", **sizes, help="set the wired limit to this instead; 0 wires no memory"
    )
    group.add_argument(
        "--cache-limit", **sizes, help="set the limit of MLX's cache to this instead"
    )
    group.add_argument("--memory-limit", **sizes, help="limit of all memory that MLX uses")


def add_dry_run_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="print what memory the run would take, and end"
    )


def show_plan(plan: "MemoryPlan") -> None:
    """Prints the memory that a run will take, and warns if that is too much."""
    print(plan)
    if warning := plan.warning():
        print("warning:", warning, file=sys.stderr)


@contextmanager
def limited_memory(args: argparse.Namespace, model_bytes: int) -> Iterator[None]:
    """Sets MLX's memory limits inside the `with` block as the memory flags ask."""
    from ...generation import memory_limits

    _warn_of_slow_cpu()
    sizes = {
        "margin_bytes": args.memory_margin,
        "wired_bytes": args.wired_limit,
        "cache_bytes": args.cache_limit,
        "memory_bytes": args.memory_limit,
    }
    given = {name: size for name, size in sizes.items() if size is not None}
    with ExitStack() as stack:
        with argument_errors():
            stack.enter_context(memory_limits(model_bytes, **given))
        yield


@cache
def _warn_of_slow_cpu() -> None:
    """Warns, once in a process, that the compiled CPU kernels are missing."""
    from ...ops.backend.inspection import slow_cpu

    if reason := slow_cpu():
        print("warning:", reason, file=sys.stderr)


def warn_of_memory(model: "Decoder", model_bytes: int, **sizes: int) -> None:
    """Warns on stderr if a model and the sizes of its work need more memory than there is."""
    from ...generation import check_memory, memory_need

    if warning := check_memory(memory_need(model, model_bytes, **sizes)):
        print("warning:", warning, file=sys.stderr)
