"""A decoding step writes into the memory of the state before, and takes no memory for another one."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.generation.decode import Decoding
from mlx_mmfree.generation.scheduling import Request, Scheduler
from tests.generation.models import VOCABULARY, attention
from tests.generation.scheduling.running import Characters

ROWS, STEPS = 16, 6
# 256 slots of 32 numbers, keys and values of two layers
STATE_BYTES = ROWS * 256 * 32 * 2 * 2 * mx.float32.size


def decoding() -> Callable[[], Any]:
    return Decoding(attention(1), mx.zeros((ROWS, 9), mx.int32)).step


def scheduler() -> Callable[[], Any]:
    scheduler = Scheduler(attention(1), Characters(VOCABULARY))
    for _ in range(ROWS):
        scheduler.submit(Request([0] * 9, max_tokens=50))
    return scheduler.step


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="only the CPU is waited for")
@pytest.mark.parametrize("make", [decoding, scheduler])
def test_a_step_takes_little_memory(make: Callable[[], Callable[[], Any]]) -> None:
    step = make()
    for _ in range(4):
        step()
    mx.synchronize()
    before = mx.get_active_memory()
    assert before > STATE_BYTES
    mx.reset_peak_memory()
    for _ in range(STEPS):
        step()
    mx.synchronize()
    assert mx.get_peak_memory() - before < STATE_BYTES / 4
