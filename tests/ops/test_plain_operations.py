"""Graphs that others can repeat: operations of MLX alone, or with the texts of Metal kernels."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.generation.export import DecodingStep, _arguments, _operations, _write_function
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.ops import pack_ternary, ternary_matmul, use_backend
from mlx_mmfree.ops.backend import launch
from mlx_mmfree.ops.backend.dispatch import (
    forced_backend,
    use_any_backend,
    use_plain_operations,
    uses_plain_operations,
)
from mlx_mmfree.ops.backend.gradient import with_reference_gradient, without_gradients
from mlx_mmfree.ops.unpacked import unpacked_matrices

LAUNCH = launch.launch
FAST = {
    name: getattr(mx.fast, name) for name in ("rope", "rms_norm", "scaled_dot_product_attention")
}
DEQUANTIZE = mx.dequantize


def packed_model(name: str) -> Decoder:
    mx.random.seed(1)
    architecture = find(name)
    model: Decoder = architecture.build(architecture.config.from_hub(architecture.tiny))
    pack_linears(model)
    model.eval()
    return model


def test_what_is_forced() -> None:
    assert not uses_plain_operations()
    with use_plain_operations():
        assert uses_plain_operations()
        with use_any_backend():
            assert uses_plain_operations()
        with use_backend("reference"):
            assert forced_backend() == "reference"
        assert uses_plain_operations()
    assert not uses_plain_operations() and forced_backend() is None


@pytest.mark.parametrize("name", ["hgrn_bit", "bitnet", "hgrn2", "gla"])
def test_plain_operations_are_the_definition(name: str) -> None:
    model = packed_model(name)
    tokens = mx.array([[3, 1, 4, 1, 5], [2, 6, 5, 3, 5]])
    with use_plain_operations():
        found, _ = model(tokens)
        mx.eval(found)
    with use_backend("reference"):
        expected, _ = model(tokens)
    assert mx.allclose(found, expected, rtol=1e-5, atol=1e-6).item()


def test_packed_weights_stay_packed() -> None:
    weight = pack_ternary(mx.random.randint(-1, 2, (48, 64)))
    x = mx.round(10 * mx.random.normal((1, 64)))
    before = unpacked_matrices().size_bytes
    with use_plain_operations():
        y = ternary_matmul(x, weight)
        mx.eval(y)
    assert unpacked_matrices().size_bytes == before
    with use_backend("reference"):
        assert mx.array_equal(y, ternary_matmul(x, weight)).item()


def test_gradients_are_left_out_where_they_cannot_be_written() -> None:
    double = with_reference_gradient(lambda x: 2 * x, lambda x: 3 * x)
    slope = mx.grad(lambda x: double(x).sum())
    x = mx.ones((2,))
    assert slope(x).tolist() == [3, 3]
    with without_gradients():
        assert double(x).tolist() == [2, 2] and slope(x).tolist() == [2, 2]
        events: list[Any] = []
        mx.export_function(lambda event: events.append(event.get("name")), double, x)
        assert "Multiply" in events
    assert slope(x).tolist() == [3, 3]


@pytest.fixture
def graphs_of_metal(recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the backend `metal` build the graphs that it builds on a Mac; they cannot run here."""
    monkeypatch.setattr(launch, "launch", LAUNCH)
    monkeypatch.setattr(mx, "dequantize", DEQUANTIZE)
    for name, function in FAST.items():
        monkeypatch.setattr(mx.fast, name, function)


@pytest.mark.skipif(mx.metal.is_available(), reason="a Mac runs what it exports")
@pytest.mark.parametrize("name", ["hgrn_bit", "bitnet"])
def test_metal_kernels_travel_as_text(name: str, graphs_of_metal: None, tmp_path: Path) -> None:
    step = DecodingStep(packed_model(name), 16)
    texts: dict[str, str] = {}

    def collect(event: dict[str, Any]) -> None:
        if event.get("name") == "CustomKernel":
            texts.update([event["arguments"][:2]])

    file = tmp_path / "step.mlxfn"
    with without_gradients():
        mx.export_function(collect, step, *_arguments(step))
        kernels = _operations(step, {})["CustomKernel"]
        _write_function(file, step, {})
    assert kernels >= len(texts) > 1
    written = file.read_bytes()
    for kernel, text in texts.items():
        assert kernel.encode() in written and text.encode() in written
    with use_plain_operations(), without_gradients():
        assert "CustomKernel" not in _operations(step, {})
