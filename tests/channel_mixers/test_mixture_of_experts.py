"""The mixture of experts against its formula, in each format of its experts."""

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mmfree.channel_mixers import MixtureOfExperts
from mlx_mmfree.layers.lora import add_adapters
from mlx_mmfree.layers.matrix import matrices, matrix_of, parameters
from mlx_mmfree.layers.ternary.values import pack_ternary_values
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

D, HIDDEN, EXPERTS, CHOSEN = 32, 24, 5, 2
NAMES = ("gate_proj", "up_proj", "down_proj")


def mixture(limit: float | None = 0.5) -> MixtureOfExperts:
    """Ternary by row, with values that the limit bites."""
    mx.random.seed(4)
    mixer = MixtureOfExperts(
        D, hidden_dims=HIDDEN, num_experts=EXPERTS, num_chosen=CHOSEN, limit=limit
    )
    for name in NAMES:
        rows, inputs = mixer[name].weight.shape
        trits = mx.random.randint(-1, 2, (rows, inputs)).astype(mx.float32)
        mixer[name].weight = trits * mx.random.uniform(0.1, 0.5, (rows, 1))
    return mixer


def formula(mixer: MixtureOfExperts, x: mx.array) -> np.ndarray:
    """One position and one expert after the other, in float64."""
    weights = {name: np.array(_matrix(mixer[name]), np.float64) for name in NAMES}
    router = np.array(mixer.router.weight, np.float64)
    found = []
    for row in np.array(x.reshape(-1, D), np.float64):
        scores = np.exp(router @ row)
        shares = scores / scores.sum()
        chosen = np.argsort(-shares)[:CHOSEN]
        total = np.zeros(D)
        for expert in chosen:
            gate, up, down = (np.split(weights[name], EXPERTS)[expert] for name in NAMES)
            values, ups = gate @ row, up @ row
            if mixer.limit is not None:
                values = np.minimum(values, mixer.limit)
                ups = np.clip(ups, -mixer.limit, mixer.limit)
            hidden = values / (1 + np.exp(-values)) * ups
            total += shares[expert] / shares[chosen].sum() * (down @ hidden)
        found.append(total)
    return np.stack(found).reshape(x.shape)


def _matrix(layer: nn.Module) -> mx.array:
    matrix = matrix_of(layer)
    if matrix is None:
        return layer.merged()
    return matrix.multiply(mx.eye(matrix.input_dims)).T


def packed(mixer: MixtureOfExperts) -> MixtureOfExperts:
    for name in NAMES:
        mixer[name] = pack_ternary_values(mixer[name])
    return mixer


def in_codes(mixer: MixtureOfExperts) -> MixtureOfExperts:
    # groups of 32 inputs
    mixer = MixtureOfExperts(D, hidden_dims=32, num_experts=EXPERTS, num_chosen=CHOSEN, limit=0.5)
    nn.quantize(mixer, group_size=32, bits=4, class_predicate=lambda path, _: "_proj" in path)
    return mixer


def adapted(kind: Any, format: Any = packed) -> Any:
    def make(mixer: MixtureOfExperts) -> MixtureOfExperts:
        mx.random.seed(6)
        add_adapters(format(mixer), lambda path, _: "_proj" in path, kind=kind, rank=2, scale=1.5)
        for name in NAMES:
            mixer[name].lora_b = 0.1 * mx.random.normal(mixer[name].lora_b.shape)
        return mixer

    return make


FORMATS: dict[str, Any] = {
    "floats": lambda mixer: mixer,
    "packed": packed,
    "codes": in_codes,
    "lora": adapted("lora"),
    "dora": adapted("dora"),
}


@pytest.mark.parametrize("format", FORMATS)
def test_formula(format: str) -> None:
    mixer = FORMATS[format](mixture())
    x = mx.random.normal((2, 7, D))
    assert relative_error(mixer(x), mx.array(formula(mixer, x))) <= TOLERANCE[mx.float32]


def test_the_limit_counts() -> None:
    x = mx.random.normal((1, 9, D))
    free, bound = mixture(None), mixture(0.5)
    assert relative_error(free(x), mx.array(formula(free, x))) <= TOLERANCE[mx.float32]
    assert relative_error(free(x), bound(x)) > 0.1


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_the_router_is_float32_in_a_model_of_16_bits(dtype: mx.Dtype) -> None:
    mixer = packed(mixture())
    x = mx.random.normal((1, 64, D)).astype(dtype)
    want, weights = mixer.choose(x.astype(mx.float32))
    mixer.set_dtype(dtype)
    assert mixer.router.weight.dtype == mx.float32
    chosen, got = mixer.choose(x)
    assert mx.array_equal(chosen, want) and mx.array_equal(got, weights)
    assert mixer(x).dtype == dtype


@pytest.mark.parametrize("format", ["packed", "lora"])
def test_gradients_are_those_of_floats(format: str) -> None:
    floats = FORMATS["floats"]
    dense = (floats if format == "packed" else adapted("lora", floats))(mixture())
    mixer = FORMATS[format](mixture())
    x = mx.random.normal((1, 6, D))

    def loss(model: MixtureOfExperts, x: mx.array) -> mx.array:
        return mx.sin(model(x)).sum()

    want, got = (mx.grad(partial(loss, model))(x) for model in (dense, mixer))
    assert relative_error(got, want) <= GRADIENT_TOLERANCE
    if format == "lora":
        # each expert that was chosen learns, and none that was not
        gradient = nn.value_and_grad(mixer, loss)(mixer, x)[1]["gate_proj"]["lora_b"]
        parts = mx.abs(gradient.T.reshape(EXPERTS, -1)).max(axis=1)
        chosen = {int(n) for n in np.array(mixer.choose(x)[0]).reshape(-1)}
        assert {n for n, part in enumerate(parts.tolist()) if part > 0} == chosen


def test_only_what_belongs_together_is_taken() -> None:
    with pytest.raises(
        ValueError, match="'num_chosen' must be at most 'num_experts' but got 3 of 2"
    ):
        MixtureOfExperts(8, hidden_dims=8, num_experts=2, num_chosen=3)
    with pytest.raises(TypeError, match="'linear' must be a linear layer but got RMSNorm"):
        mixer = mixture()
        mixer.up_proj = nn.RMSNorm(D)
        mixer(mx.zeros((1, D)))
    assert mixture()(mx.zeros((1, 0, D))).shape == (1, 0, D)


def test_matrices_are_those_of_all_experts() -> None:
    found = matrices(mixture())
    assert {path: (each.output_dims, each.input_dims) for path, each in found.items()} == {
        "router": (EXPERTS, D),
        "gate_proj": (EXPERTS * HIDDEN, D),
        "up_proj": (EXPERTS * HIDDEN, D),
        "down_proj": (EXPERTS * D, HIDDEN),
    }
    assert set(parameters(mixture())) == {f"{path}.weight" for path in found}
