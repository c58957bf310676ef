"""The weights that a run from a corpus begins with."""

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import yaml
from mlx.utils import tree_flatten

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.models import Decoder, architectures, find, find_described
from mlx_mmfree.training import Settings
from mlx_mmfree.training.corpus.mixture import Stage
from mlx_mmfree.training.first_model import FirstModel, _check_keys

HGRN = {
    "model_type": "hgrn_bit",
    "vocab_size": 900,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
}
BITNET = HGRN | {
    "model_type": "bitnet",
    "rope_theta": 500000.0,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def _settings(**values: Any) -> Settings:
    given: dict[str, Any] = {"output": "run", "model": HGRN, "stages": (Stage(1, {"a": 1}),)}
    return Settings(**(given | values))


def _weights(model: Decoder) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("model", [HGRN, HGRN | {"linear_class": "dense"}, BITNET], ids=str)
def test_only_the_embedding_has_its_standard_deviation(model: dict[str, Any]) -> None:
    mx.random.seed(0)
    architecture = find(model["model_type"])
    plain = _weights(architecture.build(architecture.config.from_hub(model)))
    for given, want in [(None, 1.0), (0.7, 0.7), (0.02, 0.02)]:
        settings = _settings(model=model, embedding_std=given)
        drawn, again = (_weights(FirstModel(settings).load()) for _ in range(2))
        assert np.std(np.array(drawn["embed.weight"])) == pytest.approx(want, rel=0.05)
        for name, weight in drawn.items():
            assert mx.array_equal(weight, again[name]), name
            # 0.02 is the standard deviation of the other weights, with which nothing is drawn anew
            is_plain = want == 0.02 or name != "embed.weight"
            assert bool(mx.array_equal(weight, plain[name])) is is_plain, name


@pytest.mark.parametrize("linear_class", ["ternary", "dense"])
def test_a_shared_embedding_keeps_its_standard_deviation(linear_class: str) -> None:
    tied = HGRN | {"tie_word_embeddings": True, "linear_class": linear_class}
    embedding = np.array(_weights(FirstModel(_settings(model=tied)).load())["embed.weight"])
    assert np.std(embedding) == pytest.approx(0.02, rel=0.05)
    with pytest.raises(TrainingError, match=r"'embedding_std' must be left out .* but got 0\.5"):
        FirstModel(_settings(model=tied, embedding_std=0.5))


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [("hiden_size", 32, "hidden_size"), ("linear", "ternary", "linear_class")],
)
def test_a_key_that_nothing_reads_is_refused(key: str, value: Any, meant: str) -> None:
    message = (
        f"'model' must hold keys that 'hgrn_bit' reads but got '{key}'. Did you mean '{meant}'?"
    )
    with pytest.raises(TrainingError, match=re.escape(message)):
        FirstModel(_settings(model=HGRN | {key: value}))


def test_keys_that_transformers_writes_are_taken() -> None:
    pasted = {"transformers_version": "5.0.0", "use_cache": True, "torch_dtype": "float32"}
    FirstModel(_settings(model=HGRN | pasted))


@pytest.mark.parametrize("recipe", ["train", "teacher", "student", "longer/train"])
def test_keys_of_the_recipes_are_taken(recipe: str) -> None:
    folder = Path(__file__).parents[2] / "examples" / "demo_model"
    described = yaml.safe_load((folder / f"{recipe}.yaml").read_text())["model"]
    _check_keys(find_described(described), described)


@pytest.mark.parametrize("name", sorted(architectures()))
def test_keys_of_every_architecture_are_taken_and_others_refused(name: str) -> None:
    architecture = find(name)
    _check_keys(architecture, architecture.tiny)
    for preset in architecture.presets.values():
        # random weights are not packed, which a run must not pass over
        dense = {key: preset[key] for key in preset.keys() - {"quantization"}}
        _check_keys(find_described(dense), dense)
    with pytest.raises(TrainingError, match="'no_such_key'"):
        _check_keys(architecture, {**architecture.tiny, "no_such_key": 1})


@pytest.mark.parametrize(("embedding_std", "low", "high"), [(0.02, 0.6, 1.0), (None, 0.0, 0.2)])
def test_tokens_of_a_text_differ_after_norms_only_with_a_large_embedding(
    embedding_std: float | None, low: float, high: float
) -> None:
    size = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
    model = FirstModel(_settings(model=BITNET | size, embedding_std=embedding_std)).load()
    hidden = model.embed(mx.array(np.random.default_rng(0).integers(0, 900, (1, 128))))
    for block in model.blocks:
        hidden, _ = block(hidden)
    late = hidden[0, 64:] / mx.linalg.norm(hidden[0, 64:], axis=-1, keepdims=True)
    # the cosines of all pairs of the later half
    cosines = np.array(late @ late.T)[np.triu_indices(64, 1)]
    assert low < cosines.mean() < high
