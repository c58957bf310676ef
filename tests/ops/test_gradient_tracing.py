"""True if MLX traces gradients, as it shows by how it computes attention."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.ops.backend import launch
from mlx_mmfree.ops.backend.gradient import assume_gradients, traces_gradients
from tests import graph


@pytest.fixture
def on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Metal. What a CPU computes attention by is what Metal does in training."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)


def test_without_metal_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", None)
    assert not traces_gradients()


def test_plain_operations_are_those_of_training(on_metal: None) -> None:
    assert traces_gradients()
    with launch.recording():
        assert not traces_gradients()


def test_one_kernel_is_that_of_inference(on_metal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        return graph.attention(q, k, v, mask=None)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", fused)
    assert not traces_gradients()


@pytest.mark.usefixtures("unfused")
def test_it_can_be_asked_while_functions_are_transformed(on_metal: None) -> None:
    found = []

    def loss(x: mx.array) -> mx.array:
        found.append(traces_gradients())
        return (x * x).sum()

    step = mx.compile(mx.grad(loss))
    assert step(mx.array([2.0])).item() == 4.0
    assert found and all(found)


def test_it_can_be_assumed(on_metal: None) -> None:
    for are_traced in (False, True):
        with assume_gradients(are_traced):
            assert traces_gradients() is are_traced
