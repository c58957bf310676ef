"""The shares of zero and of changed trits, counted one by one."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.ops import ternarize
from mlx_mmfree.training.ternary_changes import TernaryWeights


# 40 and 56 inputs leave padding in a packed row
def _model() -> Decoder:
    mx.random.seed(1)
    architecture = find("hgrn_bit")
    config = {"vocab_size": 50, "hidden_size": 40, "num_hidden_layers": 2, "intermediate_size": 56}
    model: Decoder = architecture.build(architecture.config.from_hub(config))
    return model


def test_shares_are_those_of_the_trits() -> None:
    model = _model()
    weights = TernaryWeights(model)
    layers = dict(model.named_modules())
    assert len(weights.names) == len(set(weights.names)) > 10
    first = [np.array(ternarize(layers[name].master)[0]) for name in weights.names]
    assert weights.metrics()["flipped_trits"] == [0.0] * len(first)
    for name in weights.names[::2]:
        layer = layers[name]
        layer.weight = layer.weight + 0.3 * mx.random.normal(layer.weight.shape)
    metrics = weights.metrics()
    for number, name in enumerate(weights.names):
        trits = np.array(ternarize(layers[name].master)[0])
        assert metrics["zero_trits"][number] == (trits == 0).mean()
        assert metrics["flipped_trits"][number] == (trits != first[number]).mean()
        assert (metrics["flipped_trits"][number] > 0) == (number % 2 == 0)


@pytest.mark.parametrize("packed", [True, False])
def test_a_model_without_masters_has_no_such_metrics(packed: bool) -> None:
    architecture = find("llama")
    model = architecture.build(architecture.config.from_hub(dict(architecture.tiny)))
    if packed:
        model = pack_linears(_model())
    assert TernaryWeights(model).metrics() == {}
