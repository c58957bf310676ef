"""Five trits a byte or 2 bits, whichever the clock of the tests finds faster."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree import native
from mlx_mmfree.ops import Projection, bit_linear, use_backend
from mlx_mmfree.ops.backend import choice
from mlx_mmfree.ops.bit_linear import weight_form
from mlx_mmfree.ops.bit_linear.weight_form import multiplies_fives
from tests.ops.test_choice import Clock, clock

__all__ = ["clock"]

SHAPE = (48, 325)

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason="no compiled kernels")


@pytest.fixture
def timed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock, which sees the form of each product."""

    def multiply(x: mx.array, projections: Sequence[Projection]) -> mx.array:
        is_five = projections[0].weight.dtype == mx.uint8
        clock.runs.append(weight_form.FIVE_TRITS if is_five else weight_form.TWO_BITS)
        return bit_linear(x, projections)

    monkeypatch.setattr(weight_form, "bit_linear", multiply)
    return clock


@pytest.mark.parametrize(("seconds", "wanted"), [(0.5, True), (0.97, False), (2.0, False)])
def test_the_faster_form(timed: Clock, seconds: float, wanted: bool) -> None:
    timed.costs = {weight_form.FIVE_TRITS: seconds}
    assert multiplies_fives(*SHAPE, 48 * 325 * 3) == wanted
    # three copies of the matrix, as much as the model has
    assert timed.runs[:6] == [weight_form.TWO_BITS] * 3 + [weight_form.FIVE_TRITS] * 3
    (kept,) = choice.kept_choices().values()
    assert kept["chosen"] == (weight_form.FIVE_TRITS if wanted else weight_form.TWO_BITS)
    assert set(kept["seconds"]) == {weight_form.TWO_BITS, weight_form.FIVE_TRITS}
    timed.runs.clear()
    assert multiplies_fives(*SHAPE, 48 * 325 * 3) == wanted and not timed.runs
    # another number of matrices lies in another memory
    assert multiplies_fives(*SHAPE, 48 * 325) == wanted and timed.runs


def test_another_result_is_never_chosen(timed: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    timed.costs = {weight_form.FIVE_TRITS: 0.1}
    multiply: Any = weight_form.bit_linear

    def wrong(x: mx.array, projections: Sequence[Projection]) -> mx.array:
        y = multiply(x, projections)
        return y + 1 if projections[0].weight.dtype == mx.uint8 else y

    monkeypatch.setattr(weight_form, "bit_linear", wrong)
    assert not multiplies_fives(*SHAPE, 48 * 325)


def test_memory_of_the_measurement_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def count(*arguments: Any, **options: Any) -> str:
        counts.append(options["facts"]["matrices"])
        return weight_form.TWO_BITS

    monkeypatch.setattr(weight_form, "choose", count)
    multiplies_fives(1024, 4096, 10**12)
    assert counts == [128]


@pytest.mark.parametrize("name", ["two_bits", "five_trits"])
def test_a_form_can_be_forced(timed: Clock, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_MMFREE_PRODUCT", name)
    assert multiplies_fives(*SHAPE, 48 * 325) == (name == "five_trits")
    with use_backend("chunked"):
        assert not multiplies_fives(*SHAPE, 48 * 325)
    assert not timed.runs
