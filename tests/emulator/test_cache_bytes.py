"""How few bytes of keys and values a decoded token moves, and MLX's rule by which they are counted."""

import pytest

from mlx_mmfree.evaluation.audit.metal_step import (
    UNFINISHED,
    MetalOperation,
    MetalStep,
    metal_step,
)
from mlx_mmfree.evaluation.audit.skeleton import presets, skeleton
from tests.emulator.counts.cache_bytes import LIMITS, SHAPES, TOKENS, moved
from tests.evaluation.audit_models import needs_graphs

pytestmark = needs_graphs
MOST = 1.1


@pytest.mark.sample(2)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tail_moves_little_beside_what_is_read(shape: str, tokens: int) -> None:
    for limit in LIMITS.values():
        found = moved(shape, tokens, limit)
        assert 1 < found.tail <= MOST
        assert found.written_last > 3


def test_a_row_that_waits_is_not_enough() -> None:
    """A step of a small model takes few command buffers, so that its caches are copied."""
    found = moved("ternary-bonsai-1.7b", 4096, LIMITS["Max"])
    assert found.waiting_buffers <= UNFINISHED
    assert found.row_waits > 3


@pytest.mark.parametrize("shape", SHAPES)
def test_more_slots_take_the_joining_launch_and_no_other(shape: str) -> None:
    model = skeleton(presets()[shape] | {"num_hidden_layers": 4})
    few, some, many, most = (metal_step(model, tokens) for tokens in (200, 3000, 4097, 32768))
    assert few.launches() <= some.launches() <= many.launches()
    assert many.launches() == most.launches() == few.launches() + len(few.caches)


def test_when_a_command_buffer_ends() -> None:
    """After more than so many launches, or inputs of so many times 2^20 elements."""

    def buffers(*operations: MetalOperation) -> int:
        return MetalStep(operations, 0, 0, ()).command_buffers(40)

    one, large = MetalOperation(1, 0), MetalOperation(1, 41 << 20)
    assert [buffers(*[one] * count) for count in (0, 1, 40, 41, 42, 82)] == [0, 1, 1, 1, 2, 2]
    assert buffers(*[MetalOperation(41, 0)] * 3) == buffers(*[large] * 3) == 3
    assert buffers(*[MetalOperation(1, 20 << 20)] * 4) == 2
    assert MetalStep([one] * 101, 0, 0, ()).command_buffers(50) == 2


def test_what_is_held_is_copied() -> None:
    update = MetalOperation(2, 10, 10, writes_into=1000)
    few, many = (
        MetalStep([update, *[MetalOperation(41, 0)] * count], 7, 5, ())
        for count in (UNFINISHED, UNFINISHED + 1)
    )
    assert few.copies() == [1000] and not many.copies()
    assert few.launches() == 2 + 1 + 41 * UNFINISHED
    assert many.launches() == 2 + 41 * (UNFINISHED + 1)
    assert (few.moved(), many.moved()) == (2012, 12)
