"""Finding architectures, and what each of their files offers."""

import mlx.core as mx
import pytest

from mlx_mmfree.errors import UnsupportedModelError
from mlx_mmfree.models import architecture_of, find, known_model_types

KNOWN = [
    "big_bird",
    "bitnet",
    "fnet",
    "gla",
    "hgrn",
    "hgrn2",
    "hgrn_bit",
    "llama",
    "longformer",
    "marian",
    "metaformer",
    "qwen3",
    "reformer",
    "retnet",
]


def test_known_types() -> None:
    assert known_model_types() == KNOWN


@pytest.mark.parametrize("model_type", KNOWN)
def test_records_hold_together(model_type: str) -> None:
    architecture = find(model_type)
    assert architecture.name == model_type
    assert "mmfree" in architecture.packed_forms
    config = architecture.config.from_hub(architecture.tiny)
    assert config.to_hub()["model_type"] == model_type
    assert architecture.config.from_hub(config.to_hub()) == config
    assert architecture_of(config) is architecture
    model = architecture.build(config)
    assert model.config == config
    assert model.predictions(mx.array([[1, 2]])).shape == (1, 2, config.vocab_size)
    assert architecture.weight_names
    for preset in architecture.presets.values():
        assert preset["model_type"] == model_type
        architecture.config.from_hub(preset)


@pytest.mark.parametrize("name", ["llama3", None, 7, "block", "fields", "rotation"])
def test_unknown_architecture_lists_the_known(name: object) -> None:
    with pytest.raises(UnsupportedModelError, match=f"must be one of {', '.join(KNOWN)} but"):
        find(name)
