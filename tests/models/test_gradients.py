"""Gradients of whole models: against finite differences in float64, and between their formats."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.layers import pack_linears
from mlx_mmfree.layers.lora import AdapterKind, add_adapters
from mlx_mmfree.models import Decoder, find
from tests.models.matmul_free_lm import MatMulFreeLM
from tests.tolerances import relative_error

TOLERANCE = 1e-3
SCALE = 2.0
SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "initializer_range": 0.3,
}
FORMATS: dict[str, dict[str, Any]] = {
    "ternary": {},
    "ternary-tied": {"tie_word_embeddings": True},
    "ternary-shared-conv": {"use_short_conv": True},
    "ternary-convs": {"use_short_conv": True, "share_conv_kernel": False},
    "dense": {"linear_class": "dense"},
    "dense-tied": {"linear_class": "dense", "tie_word_embeddings": True},
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
# groups of 32
WIDE = HEADS | {"hidden_size": 32, "intermediate_size": 64}


def _build(model_type: str, **keys: Any) -> Decoder:
    mx.random.seed(0)
    module = find(model_type)
    model = module.build(module.config.from_hub(SIZES | keys))
    for path, value in tree_flatten(model.parameters()):
        if path == "lower_bounds" or path.endswith("norm.weight"):
            value += 0.3 * mx.random.normal(value.shape)
    return model


def _train_a_little(model: nn.Module) -> None:
    """Moves adapters from where they do nothing."""
    mx.random.seed(1)
    for path, value in tree_flatten(model.trainable_parameters()):
        if path.endswith("lora_b"):
            value += 0.1 * mx.random.normal(value.shape)
        elif path.endswith(".m"):
            value *= mx.random.uniform(0.5, 1.5, value.shape)


def _tokens(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 24, (2, 7))


def _loss(model: Decoder, tokens: mx.array) -> mx.array:
    logits, _ = model(tokens[:, :-1])
    return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")


def _gradients(model: Decoder, tokens: np.ndarray) -> tuple[float, dict[str, mx.array]]:
    loss, tree = nn.value_and_grad(model, _loss)(model, mx.array(tokens))
    return loss.item(), dict(tree_flatten(tree))


def _as_numpy(parameters: Any) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in tree_flatten(parameters)}


def _check(model: Decoder, point: dict[str, np.ndarray]) -> set[str]:
    """Compares along random directions: an error shows by its own length, wherever it points."""
    definitions = (MatMulFreeLM(point, _tokens(n), adapter_scale=SCALE) for n in range(50))
    # a code on the other side of a boundary is another function
    definition = next(d for d in definitions if d.margin > 1e-4)
    loss, gradients = _gradients(model, definition.tokens)
    assert abs(loss - definition.at_point) <= 1e-5
    random = np.random.default_rng(2)
    for name, gradient in gradients.items():
        got = np.array(gradient, dtype=np.float64)
        assert np.abs(got).max() > 0, name
        for _ in range(3):
            direction = random.standard_normal(got.shape)
            want = definition.derivative(name, direction)
            assert abs((got * direction).sum() - want) <= TOLERANCE * np.linalg.norm(got), name
    return set(gradients)


@pytest.mark.sample(2)
@pytest.mark.parametrize("format", FORMATS)
def test_every_parameter_against_finite_differences(format: str) -> None:
    model = _build("hgrn_bit", **FORMATS[format])
    point = _as_numpy(model.parameters())
    assert _check(model, point) == set(point)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_adapter_against_finite_differences(format: str, kind: AdapterKind) -> None:
    model = _build("hgrn_bit", **FORMATS[format])
    point = _as_numpy(model.parameters())
    names = add_adapters(pack_linears(model), lambda *_: True, kind=kind, rank=2, scale=SCALE)
    _train_a_little(model)
    point |= _as_numpy(model.trainable_parameters())
    ends = ("lora_a", "lora_b") + (("m",) if kind == "dora" else ())
    assert _check(model, point) == {f"{name}.{end}" for name in names for end in ends}
    assert "embed" in names and ("head" in names or format == "dense-tied")


def _without_codes(model: Decoder) -> list[tuple[str, mx.array]]:
    """The weights of a quantised model as floats."""
    return [
        (
            f"{name}.weight",
            mx.dequantize(
                module.weight, module.scales, module.biases, module.group_size, module.bits
            ),
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
    ]


def _quantized_and_dense(model_type: str, **keys: Any) -> tuple[Decoder, Decoder]:
    model, dense = _build(model_type, **WIDE, **keys), _build(model_type, **WIDE, **keys)
    nn.quantize(model, group_size=32, bits=4)
    dense.load_weights(_without_codes(model), strict=False)
    return model, dense


def _packed_and_float(model_type: str, **keys: Any) -> tuple[Decoder, Decoder]:
    return pack_linears(_build(model_type, **HEADS, **keys)), _build(model_type, **HEADS, **keys)


PAIRS: dict[str, Callable[[], tuple[Decoder, Decoder]]] = {
    "bitnet": lambda: _packed_and_float("bitnet", rope_theta=5e5),
    "bitnet-tied": lambda: _packed_and_float("bitnet", rope_theta=5e5, tie_word_embeddings=True),
    "llama": lambda: _quantized_and_dense("llama"),
    "llama-tied": lambda: _quantized_and_dense("llama", tie_word_embeddings=True),
    "qwen3": lambda: _quantized_and_dense("qwen3"),
    "gemma": lambda: _quantized_and_dense(
        "gemma3_text", sliding_window=4, sliding_window_pattern=2
    ),
    "minicpm": lambda: _quantized_and_dense("minicpm", scale_emb=2.0, dim_model_base=16.0),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("pair", PAIRS)
def test_adapters_of_packed_weights_learn_as_those_of_floats(pair: str, kind: AdapterKind) -> None:
    model, dense = PAIRS[pair]()
    for each in (model, dense):
        add_adapters(each, lambda *_: True, kind=kind, rank=2, scale=SCALE)
    _train_a_little(model)
    dense.update(model.trainable_parameters())
    loss, got = _gradients(model, _tokens(0))
    want_loss, want = _gradients(dense, _tokens(0))
    assert abs(loss - want_loss) <= 1e-5
    assert set(got) == set(want)
    for name, gradient in want.items():
        assert relative_error(got[name], gradient) <= TOLERANCE, name
