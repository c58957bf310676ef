"""MLGRU: projections in one matrix, what is refused."""

import mlx.core as mx
import pytest

from mlx_mmfree.token_mixers import MLGRU
from mlx_mmfree.token_mixers.mlgru import Stacking
from tests.tolerances import TOLERANCE, relative_error

NAMES = ("input_proj", "forget_proj", "gate_proj")


@pytest.mark.parametrize(("stacking", "stacked"), [("recurrence", 2), ("all", 3)])
def test_stacked_projections_are_the_same_ones(stacking: Stacking, stacked: int) -> None:
    x = mx.random.normal((2, 5, 8), key=mx.random.key(1))
    apart, mixer = MLGRU(8, bias=True), MLGRU(8, bias=True, stacking=stacking)
    name = "recurrence_proj" if stacked == 2 else "gates_proj"
    for part in ("weight", "bias"):
        parts = [apart[each][part] for each in NAMES[:stacked]]
        mixer[name][part] = mx.concatenate(parts)
    for each in (*NAMES[stacked:], "output_proj"):
        mixer[each] = apart[each]
    assert relative_error(mixer(x)[0], apart(x)[0]) <= TOLERANCE[mx.float32]


def test_an_unknown_stacking_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[MLGRU\] 'stacking' must be one of 'none'"):
        MLGRU(8, stacking="some")  # type: ignore[arg-type]
