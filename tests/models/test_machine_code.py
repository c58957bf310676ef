"""Nothing that models and mixers compute lets MLX compile machine code, which every test is asked.

The fixture `compiles_nothing` fails those that do. Here is what other tests compute with the compiled
kernels alone, or in training alone.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import find, known_model_types
from mlx_mmfree.ops import use_backend
from tests.spatial_mixers.test_contract import MIXERS as SPATIAL_MIXERS
from tests.token_mixers.contract.cases import ALL, Case, beside, by_case, sequence

BACKENDS = {"any": nullcontext, "reference": lambda: use_backend("reference")}
each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
Backend = Callable[[], AbstractContextManager[None]]
# layers of a feed-forward that a description names
ACTIVATIONS = {
    "big_bird": ("hidden_act", ("gelu", "gelu_new", "relu")),
    "fnet": ("hidden_act", ("gelu", "gelu_new", "relu")),
    "longformer": ("hidden_act", ("gelu", "gelu_new", "relu")),
    "marian": ("activation_function", ("gelu", "gelu_new", "relu", "swish")),
    "reformer": ("hidden_act", ("gelu", "gelu_new", "relu", "silu")),
}
MODELS = [
    pytest.param(name, {key: value} if key else {}, id=f"{name}-{value or 'plain'}")
    for name in known_model_types()
    for key, values in [ACTIVATIONS.get(name, ("", ("",)))]
    for value in values
]


@pytest.mark.sample(1, of="name")
@each_backend
@pytest.mark.parametrize(("name", "keys"), MODELS)
def test_architectures(name: str, keys: dict[str, str], backend: Backend) -> None:
    architecture = find(name)
    config = architecture.config.from_hub({**architecture.tiny, **keys})
    model = architecture.build(config)
    given = architecture.sample(config)
    with backend():
        gradient = nn.value_and_grad(model, lambda given: model.predictions(given).square().mean())
        mx.eval(gradient(mx.concatenate([given, given])))
        for dtype in (mx.float32, mx.bfloat16):
            model.set_dtype(dtype)
            mx.eval(pack_linears(model.eval()).predictions(given))


@each_backend
@by_case(ALL)
def test_token_mixers(case: Case, backend: Backend) -> None:
    mixer, x = case.mixer, sequence()
    with backend():
        y, state = mixer(x, **beside(mixer))
        if mixer.is_causal:
            y, state = mixer(x[:, :1], state, **beside(mixer))
        mx.eval(y, [array for _, array in tree_flatten(state) if isinstance(array, mx.array)])


@each_backend
@pytest.mark.parametrize(("mixer", "options"), SPATIAL_MIXERS)
def test_spatial_mixers(mixer: type, options: dict[str, object], backend: Backend) -> None:
    with backend():
        mx.eval(mixer(32, **options).eval()(mx.ones((1, 5, 6, 32))))
