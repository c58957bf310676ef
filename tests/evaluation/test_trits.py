"""Shares and scales of ternary matrices."""

import numpy as np
import pytest

from mlx_mmfree.evaluation import model_tree
from mlx_mmfree.evaluation.model_tree import count_trits
from mlx_mmfree.layers import BitLinear, pack_linears
from mlx_mmfree.ops import ternarize
from tests.hub.checkpoints import tiny_model


def test_shares_are_those_of_the_rounded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    wanted = {path: m.weight for path, m in model.named_modules() if isinstance(m, BitLinear)}
    monkeypatch.setattr(model_tree, "_ROWS_AT_A_TIME", 100)
    found = {each.path: each for each in count_trits(pack_linears(model))}
    assert set(found) == set(wanted)
    for path, weight in wanted.items():
        values, scale = ternarize(weight)
        each = found[path]
        assert each.shape == weight.shape
        assert each.counts == tuple(int((np.array(values) == sign).sum()) for sign in (-1, 0, 1))
        assert each.scales == (scale.item(),) * 3
        assert sum(each.shares) == pytest.approx(1.0)


def test_layers_are_in_order() -> None:
    model = pack_linears(tiny_model(num_hidden_layers=11))
    numbers = [each.layer for each in count_trits(model)]
    inside = [number for number in numbers if number is not None]
    assert inside == sorted(inside) and max(inside) == 10
    assert {each.kind for each in count_trits(model) if each.layer is None} == {"head"}


def test_a_dense_model_has_none() -> None:
    assert count_trits(tiny_model(linear_class="dense")) == []
