"""Values of configurations: whole numbers, and names that mean the same activation."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.models import find
from mlx_mmfree.models.parts.fields import ACTIVATIONS, dtype_name, integer
from mlx_mmfree.ops import activate
from mlx_mmfree.ops.activations import gelu_tanh
from tests.tolerances import TOLERANCE, relative_error

SILU = (
    *("bitnet", "delta_net", "gated_deltanet", "gla", "hgrn", "hgrn2", "hgrn_bit", "kda", "llama"),
    *("mamba2", "qwen3", "retnet"),
)
OTHERS = ("big_bird", "fnet", "longformer", "marian", "reformer")


def test_whole_numbers_may_be_written_as_floats() -> None:
    assert integer({"vocab_size": 64.0}, "vocab_size") == 64
    sizes = {"hidden_size": 32.0, "num_attention_heads": 4.0, "vocab_size": 60.0}
    whole = {key: int(value) for key, value in sizes.items()}
    config = find("llama").config
    assert repr(config.from_hub(sizes)) == repr(config.from_hub(whole))
    for value in (64.5, float("nan"), float("inf"), True, "64", 2.0**60):
        with pytest.raises(CheckpointError, match="'vocab_size' must be a whole number"):
            integer({"vocab_size": value}, "vocab_size")


@pytest.mark.parametrize("name", SILU)
def test_swish_is_silu(name: str) -> None:
    architecture = find(name)
    read = [
        architecture.config.from_hub({**architecture.tiny, "hidden_act": act})
        for act in ("silu", "swish")
    ]
    assert read[0] == read[1]
    with pytest.raises(UnsupportedModelError, match="'hidden_act' must be '"):
        architecture.config.from_hub({**architecture.tiny, "hidden_act": "gelu"})


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OTHERS)
def test_names_of_one_activation_make_one_model(name: str) -> None:
    architecture = find(name)
    key = "activation_function" if name == "marian" else "hidden_act"
    outputs: dict[str, list[mx.array]] = {}
    for act, meant in ACTIVATIONS.items():
        if meant == "relu2":
            continue
        config = architecture.config.from_hub({**architecture.tiny, key: act})
        assert config.to_hub()[key] == act
        mx.random.seed(3)
        model = architecture.build(config)
        model.eval()
        outputs.setdefault(meant, []).append(model.predictions(architecture.sample(config)))
    assert outputs.keys() == {"relu", "silu", "gelu", "gelu_tanh"}
    for same in outputs.values():
        assert all(mx.array_equal(each, same[0]) for each in same)
    first = [same[0] for same in outputs.values()]
    assert not any(mx.array_equal(a, b) for n, a in enumerate(first) for b in first[:n])


@pytest.mark.interop
def test_names_mean_what_they_mean_in_transformers() -> None:
    import torch
    from transformers.activations import ACT2FN

    x = mx.linspace(-6, 6, 301)
    for name, meant in ACTIVATIONS.items():
        want = mx.array(ACT2FN[name](torch.tensor(x.tolist())).numpy())
        is_approximate = meant == "gelu_tanh"
        got = gelu_tanh(x) if is_approximate else activate(x, activation=meant)
        assert relative_error(got, want) <= TOLERANCE[mx.float32], name


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({}, None),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32", "torch_dtype": "float32"}, "float32"),
    ],
    ids=str,
)
def test_the_dtype_has_two_names(config: dict[str, Any], name: str | None) -> None:
    assert dtype_name(config) == name


def test_two_dtypes_are_refused() -> None:
    with pytest.raises(CheckpointError, match="'dtype' and 'torch_dtype' must be equal"):
        dtype_name({"dtype": "float32", "torch_dtype": "float16"})
