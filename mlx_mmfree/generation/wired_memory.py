"""Wired memory, which stays resident, so that a model is not paged out between tokens.

Only Metal has it. The limit is one of the process: the first who asks sets it, and the last one who no
longer needs it restores what was there before.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

import mlx.core as mx
from mlx.utils import tree_reduce

from ..models import Decoder
from ..platform.device import DeviceInfo, device_info

Setter = Callable[[int], int]
Step = TypeVar("Step")

MARGIN_BYTES = 4 * 2**30
"""How much the limit exceeds the size of the model."""


@dataclass
class _Limit:
    """How many need the limit, and what the first of them found."""

    users: int = 0
    before: int = 0


_lock, _limit = Lock(), _Limit()


@contextmanager
def wired(size: int, set_wired: Setter = mx.set_wired_limit) -> Iterator[None]:
    """Sets the wired limit inside the `with` block, unless it is set for another block."""
    with _lock:
        if not _limit.users:
            _limit.before = set_wired(size)
        _limit.users += 1
    try:
        yield
    finally:
        # work under way still counts on the limit
        mx.synchronize()
        with _lock:
            _limit.users -= 1
            if not _limit.users:
                set_wired(_limit.before)


def while_wired(
    steps: Iterator[Step],
    *models: Decoder | None,
    device: DeviceInfo | None = None,
    set_wired: Setter = mx.set_wired_limit,
) -> Generator[Step, None, None]:
    """The steps of a generation, with the memory of its models wired from the first to the last."""
    working_set = (device_info() if device is None else device).working_set_bytes
    if working_set is None:
        yield from steps
        return
    weights = [model.parameters() for model in models if model is not None]
    size = tree_reduce(lambda total, array: total + array.nbytes, weights, 0)
    with wired(min(size + MARGIN_BYTES, working_set), set_wired):
        yield from steps
