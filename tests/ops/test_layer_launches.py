"""How many operations a layer launches on Metal, counted in the graph of the uncompiled step.

MLX's fast operations and the library's kernels are stand-ins that count as one each, as does what the
library lets MLX fuse; views count as none. A concatenation counts as a copy of each part, and a pad as a
fill and a copy. A layer's own are what a model of three layers has beyond one of two. Weights are merged
as they are when a model is loaded.
"""

from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_unflatten

from mlx_mmfree.generation.reader import fixed_state, with_tails
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.layers.merged import merge_projections
from mlx_mmfree.layers.rotated import RotatedLinear
from mlx_mmfree.layers.states import TAIL_SLOTS
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.ops import activations
from mlx_mmfree.ops.backend import choice
from tests import graph

# the package names its function so
linear_product = import_module("mlx_mmfree.ops.linear_product")
TERNARY = {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}}
HEADS = {"head_dim": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "hgrn_bit": ("hgrn_bit", {}),
    "bitnet": ("bitnet", HEADS),
    "ternary llama": ("llama", {**TERNARY, **HEADS}),
    "dense llama": ("llama", HEADS),
    "biased llama": ("llama", {"attention_bias": True, "mlp_bias": True, **HEADS}),
    "qwen3": ("qwen3", HEADS),
    "linear layer of qwen3.5": (
        "qwen3_5_text",
        {
            "layer_types": None,
            "full_attention_interval": 100,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "full layer of qwen3.5": (
        "qwen3_5_text",
        {"layer_types": None, "full_attention_interval": 1, "head_dim": 128},
    ),
}
CODES = "codes of 2 bits"
ROTATED = "rotated codes"
BIASES = "biases of float32"
# what linears hold, where that is not what the architecture says
VARIANTS = {
    f"{layer} layer of qwen3.5, {variant}": (f"{layer} layer of qwen3.5", variant)
    for layer in ("linear", "full")
    for variant in (CODES, ROTATED)
} | {f"biased llama, {BIASES}": ("biased llama", BIASES)}
# the numbers for a decoded token, and for a prompt
LAUNCHES = {
    "hgrn_bit": (5, 10),
    "bitnet": (5, 14),
    "ternary llama": (5, 14),
    "dense llama": (8, 13),
    "biased llama": (10, 15),
    f"biased llama, {BIASES}": (12, 17),
    "qwen3": (8, 16),
    "linear layer of qwen3.5": (10, 20),
    "full layer of qwen3.5": (8, 20),
    f"linear layer of qwen3.5, {CODES}": (12, 22),
    f"full layer of qwen3.5, {CODES}": (10, 22),
    f"linear layer of qwen3.5, {ROTATED}": (13, 23),
    f"full layer of qwen3.5, {ROTATED}": (10, 22),
}


def _model(name: str, layers: int) -> Decoder:
    of_model, variant = VARIANTS.get(name, (name, ""))
    model_type, options = MODELS[of_model]
    architecture = find(model_type)
    widths = {"hidden_size": 64, "intermediate_size": 128} if variant else {}
    config = {**architecture.tiny, **options, **widths, "num_hidden_layers": layers}
    model: Decoder = architecture.build(architecture.config.from_hub(config))
    pack_linears(model)
    if variant == CODES:
        nn.quantize(model, 32, 2, class_predicate=lambda _, module: isinstance(module, nn.Linear))
    if variant == ROTATED:
        _rotate(model)
    if variant == BIASES:
        model.set_dtype(mx.float16)
        for module in model.modules():
            if "bias" in module:
                module.bias = module.bias.astype(mx.float32)
    mx.eval(model.parameters())
    return merge_projections(model)


def _rotate(model: Decoder) -> None:
    """Gives all linears of blocks the format of Bonsai 2's, but for the gates of heads."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and not path.endswith(("beta_proj", "decay_proj", "head")):
            outputs, inputs = module.weight.shape
            rotated = RotatedLinear(inputs, outputs, group_size=64, bits=2, block=64)
            model.update_modules(tree_unflatten([(path, rotated)]))


def layer_models(name: str) -> tuple[Decoder, Decoder]:
    """Two models, the second with one layer more."""
    return _model(name, 2), _model(name, 3)


def _decoded(model: Decoder, batch: int) -> Any:
    """One token of each row, as the decoding loop reads it."""
    each = model.block_arguments()
    _, state = model.hidden(mx.ones((batch, 7), mx.int32), block_arguments=each)
    mx.eval(each, state)
    fixed, _ = fixed_state(model, state)
    fixed = with_tails(model, fixed, TAIL_SLOTS)
    mx.eval(fixed)
    hidden, state = model.hidden(mx.ones((batch, 1), mx.int32), fixed, block_arguments=each)
    return model.logits(hidden), state


def read_prompt(model: Decoder, batch: int, length: int = 64) -> Any:
    """A prompt of more rows than one kernel projects, as the decoding loop reads it."""
    each = model.block_arguments()
    mx.eval(each)
    return model.hidden(mx.ones((batch, length), mx.int32), block_arguments=each)


def _read_split(model: Decoder, batch: int) -> Any:
    """The same, where split inputs were chosen."""
    with choice.use("split"):
        return read_prompt(model, batch)


@pytest.fixture
def fused_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts as one operation what MLX fuses on a GPU; a CPU would compile it with the states."""
    fuse_gates(monkeypatch)


def fuse_gates(patch: pytest.MonkeyPatch) -> None:
    """Makes it one as long as the patch lasts."""
    patch.setattr(activations, "on_cpu", lambda: False)
    patch.setattr(activations, "_fused_gate", lambda activation: _gated)
    patch.setattr(linear_product, "on_cpu", lambda: False)
    patch.setattr(linear_product, "_fused_sum", lambda: _gated)


def _gated(gate: mx.array, up: mx.array) -> mx.array:
    return graph.stand_in([gate.shape], [gate.dtype], gate, up)[0]


@pytest.mark.sample(1, of="name")
@pytest.mark.usefixtures("recorded", "fused_gates")
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", [*MODELS, *VARIANTS])
def test_launches_of_a_layer(name: str, batch: int) -> None:
    models = layer_models(name)
    decoded, read = LAUNCHES[name]
    for call, count in ((_decoded, decoded), (read_prompt, read), (_read_split, read)):
        small, large = (graph.launches(call(model, batch)) for model in models)
        added = large - small
        assert added.total() == count, added


@pytest.mark.usefixtures("recorded", "fused_gates")
@pytest.mark.parametrize("name", [name for name in LAUNCHES if name.startswith("linear layer")])
def test_launches_of_a_short_turn(name: str) -> None:
    """A layer with the gated delta rule, whether its last chunk is full or not."""
    models = layer_models(name)
    for length in (33, 40, 64, 65, 97, 200, 509, 512):
        small, large = (graph.launches(read_prompt(model, 1, length)) for model in models)
        # one more copies the outputs where the last chunk is not full
        assert (large - small).total() + 1 <= 32, length
