"""Whatever is done to the linears of a model, in any order, it computes what its definitions say.

The blocks were fused when the model was built, and does not notice what is done to it afterwards.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_mmfree.layers import pack_linears, plain_definitions
from mlx_mmfree.layers.lora import AdapterKind, add_adapters
from mlx_mmfree.layers.matrix import parameters
from mlx_mmfree.layers.rotated import RotatedLinear
from mlx_mmfree.layers.ternary.groups import TernaryGroupLinear, TernaryScheme
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.models.parts.block import set_dropout
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

TERNARY = {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "hgrn_bit": ("hgrn_bit", {}),
    "dense llama": ("llama", {"head_dim": 32}),
    "ternary llama": ("llama", {**TERNARY, "head_dim": 32}),
    "experts": ("qwen3_moe", {}),
    "qwen3.5": ("qwen3_5_text", {}),
    "rwkv7": ("rwkv7", {}),
    "gla": ("gla", {}),
}
TOKENS = mx.array([[1, 2, 3, 4, 5, 6, 7]])
SCHEME = TernaryScheme(group_size=32)
Change = Callable[[Decoder, Random], object]


def _floats(model: Decoder, draw: Random) -> list[tuple[str, nn.Module]]:
    """Some of the linears of floats in blocks that are no experts."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and path.startswith("blocks")
        and module.weight.shape[1] % 64 == 0
        and "bias" not in module
        and not ("channel" in path and model.config.model_type == "qwen3_moe")
        and draw.random() < 0.5
    ]


def pack(model: Decoder, draw: Random) -> None:
    pack_linears(model)


def adapt(model: Decoder, draw: Random) -> None:
    kinds: tuple[AdapterKind, ...] = ("lora", "dora")
    kind = draw.choice(kinds)
    add_adapters(model, lambda path, _: "mixer" in path and draw.random() < 0.6, rank=2, kind=kind)
    for name, array in parameters(model).items():
        if name.endswith("lora_b"):
            fresh = 0.1 * mx.random.normal(array.shape)
            model.update(tree_unflatten([(name, fresh.astype(array.dtype))]))


def encode(model: Decoder, draw: Random) -> None:
    chosen = [module for _, module in _floats(model, draw)]
    nn.quantize(model, 32, draw.choice((2, 4)), class_predicate=lambda _, each: each in chosen)


def rotate(model: Decoder, draw: Random) -> None:
    for path, module in _floats(model, draw):
        rows, columns = module.weight.shape
        layer = RotatedLinear(columns, rows, group_size=64, bits=4, block=64)
        layer.weight, layer.scales, layer.biases = mx.quantize(module.weight, 64, 4)
        layer.signs = mx.where(mx.random.uniform(shape=(columns,)) < 0.5, -1.0, 1.0)
        model.update_modules(tree_unflatten([(path, layer)]))


def make_trits(model: Decoder, draw: Random) -> None:
    layers = [(path, TernaryGroupLinear(each, SCHEME)) for path, each in _floats(model, draw)]
    model.update_modules(tree_unflatten(layers))


def replace(model: Decoder, draw: Random) -> None:
    """By linears of MLX, as a user makes them."""
    for path, module in _floats(model, draw):
        rows, columns = module.weight.shape
        layer = nn.Linear(columns, rows, bias=False)
        layer.update(module.parameters())
        model.update_modules(tree_unflatten([(path, layer)]))


CHANGES: tuple[Change, ...] = (pack, adapt, encode, rotate, make_trits, replace)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_any_order(name: str, seed: int) -> None:
    mx.random.seed(seed)
    draw, (model_type, options) = Random(seed), MODELS[name]
    architecture = find(model_type)
    sizes = {"hidden_size": 64, "intermediate_size": 128} if name != "rwkv7" else {}
    config = architecture.config.from_hub({**architecture.tiny, **sizes, **options})
    model: Decoder = architecture.build(config)
    done = []
    for change in draw.sample(CHANGES, 4):
        change(model, draw)
        done.append(change.__name__)
        got, _ = model.eval()(TOKENS)
        with plain_definitions():
            want, _ = model(TOKENS)
        assert relative_error(got, want) <= TOLERANCE[got.dtype], done
    if not model.trainable_parameters():
        return
    set_dropout(model, 0.0)

    def loss(model: Decoder) -> mx.array:
        return (model(TOKENS)[0] * mx.cos(mx.arange(model.vocab_size))).sum()

    gradient = nn.value_and_grad(model, loss)(model)[1]
    with plain_definitions():
        expected = nn.value_and_grad(model, loss)(model)[1]
    given: dict[str, Any] = dict(tree_flatten(gradient))
    for key, array in dict[str, Any](tree_flatten(expected)).items():
        assert relative_error(given[key], array) <= GRADIENT_TOLERANCE, (done, key)
