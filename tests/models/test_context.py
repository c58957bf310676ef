"""Values that all blocks of a model share in a call are computed once, not in each."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.layers.context import Context
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.models.parts import stack
from mlx_mmfree.ops import use_backend
from tests import graph
from tests.backends import change_backend

TOKENS = mx.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
VALID = mx.array([[False, False, True, True, True], [True] * 5])
STARTS = mx.array([[True, False, True, False, False], [True, False, False, False, True]])
# positions, orders, slots and masks are made of these
SHARED = {
    *("Arange", "ArgSort", "CumMax", "CumSum", "Max", "Minimum", "Remainder", "Cos", "Sin"),
    *("Less", "LessEqual", "Greater", "GreaterEqual", "LogicalAnd", "LogicalOr", "LogicalNot"),
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, dynamic positions": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 4,
    },
    "llama, window": {"window": {"max_size": 6}},
    "hgrn_bit": {"linear_class": "dense"},
    "hgrn_bit, convolutions": {"linear_class": "dense", "use_short_conv": True},
}


def _build(name: str, layers: int) -> Decoder:
    options = dict(MODELS[name])
    window = options.pop("window", None)
    architecture = find(name.split(",")[0])
    config = {**architecture.tiny, **options, "num_hidden_layers": layers}
    model: Decoder = architecture.build(architecture.config.from_hub(config))
    for block in model.blocks if window else []:
        block.token_mixer = block.token_mixer.with_state(**window)
    mx.eval(model.parameters())
    return model


def _before(model: Decoder, valid: mx.array | None = None) -> Any:
    _, state = model(TOKENS, None, valid)
    mx.eval(state)
    return state


CALLS: dict[str, Callable[[Decoder], Any]] = {
    "a prompt": lambda model: model(TOKENS),
    "a padded prompt": lambda model: model(TOKENS, None, VALID),
    "several samples": lambda model: model(TOKENS, starts=STARTS),
    "padded samples": lambda model: model(TOKENS, None, VALID, starts=STARTS),
    "a second part": lambda model: model(TOKENS, _before(model)),
    "a padded second part": lambda model: model(TOKENS, _before(model, VALID), VALID),
    "a token": lambda model: model(TOKENS[:, :1], _before(model)),
    "a token after padding": lambda model: model(TOKENS[:, :1], _before(model, VALID)),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_more_adds_nothing_that_is_shared(
    name: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.fast, "rope", graph.rope)
    change_backend(
        monkeypatch,
        "attention",
        "reference",
        run=lambda q, k, v, mask, *_: graph.attention(q, k, v, mask=mask),
    )
    with use_backend("reference"):
        small, large = (graph.operations(CALLS[call](_build(name, n))) for n in (2, 3))
    added = large - small
    assert added["Matmul"] >= 6
    assert not SHARED & added.keys(), added


@pytest.mark.parametrize("name", ["llama", "llama, window", "hgrn_bit, convolutions"])
def test_what_is_shared_ends_with_the_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is freed at once, without waiting for the collector of cycles."""
    made = []

    class Watched(Context):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            made.append(weakref.ref(self))

    monkeypatch.setattr(stack, "Context", Watched)
    model = _build(name, 2)
    gc.disable()
    try:
        model(TOKENS, _before(model, VALID), VALID, starts=None if "window" in name else STARTS)
    finally:
        gc.enable()
    assert len(made) == 2 and all(reference() is None for reference in made)
