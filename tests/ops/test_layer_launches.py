"""How many operations a layer launches on Metal, counted in the graph of the uncompiled step.

MLX's fast operations and the library's kernels are stand-ins that count as one each; views count as
none. A layer's own are what a model of three layers has beyond one of two.
"""

from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.generation.decode import fixed_state
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.ops.backend import choice
from tests import graph

TERNARY = {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "hgrn_bit": ("hgrn_bit", {}),
    "bitnet": ("bitnet", {}),
    "ternary llama": ("llama", TERNARY),
    "dense llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "linear layer of qwen3.5": (
        "qwen3_5_text",
        {
            "layer_types": None,
            "full_attention_interval": 100,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "full layer of qwen3.5": ("qwen3_5_text", {"layer_types": None, "full_attention_interval": 1}),
}
# the numbers for a decoded token, and for a prompt
LAUNCHES = {
    "hgrn_bit": (5, 10),
    "bitnet": (8, 12),
    "ternary llama": (8, 12),
    "dense llama": (19, 17),
    "qwen3": (22, 20),
    "linear layer of qwen3.5": (19, 211),
    "full layer of qwen3.5": (25, 23),
}


def _model(name: str, layers: int) -> Decoder:
    model_type, options = MODELS[name]
    architecture = find(model_type)
    config = {**architecture.tiny, **options, "num_hidden_layers": layers}
    model: Decoder = architecture.build(architecture.config.from_hub(config))
    pack_linears(model)
    mx.eval(model.parameters())
    return model


def _decoded(model: Decoder, batch: int) -> Any:
    """One token of each row, as the decoding loop reads it."""
    each = model.block_arguments()
    _, state = model.hidden(mx.ones((batch, 7), mx.int32), block_arguments=each)
    mx.eval(each, state)
    fixed, _ = fixed_state(model, state)
    mx.eval(fixed)
    hidden, state = model.hidden(mx.ones((batch, 1), mx.int32), fixed, block_arguments=each)
    return model.logits(hidden), state


def _read(model: Decoder, batch: int) -> Any:
    """A prompt of more rows than one kernel projects, as the decoding loop reads it."""
    each = model.block_arguments()
    mx.eval(each)
    return model.hidden(mx.ones((batch, 64), mx.int32), block_arguments=each)


def _read_split(model: Decoder, batch: int) -> Any:
    """The same, where split inputs were chosen."""
    with choice.use("split"):
        return _read(model, batch)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", MODELS)
def test_launches_of_a_layer(name: str, batch: int) -> None:
    models = [_model(name, layers) for layers in (2, 3)]
    decoded, read = LAUNCHES[name]
    for call, count in ((_decoded, decoded), (_read, read), (_read_split, read)):
        small, large = (graph.operations(call(model, batch)) for model in models)
        added = large - small
        assert added.total() == count, added
