"""Finding architectures, and what each of their files offers."""

import mlx.core as mx
import pytest

from mlx_mmfree.errors import UnsupportedModelError
from mlx_mmfree.models import find, known_model_types

KNOWN = ["bitnet", "hgrn_bit", "llama", "qwen3"]


def test_known_types() -> None:
    assert known_model_types() == KNOWN


@pytest.mark.parametrize("model_type", KNOWN)
def test_files_follow_the_interface(model_type: str) -> None:
    module = find(model_type)
    assert model_type in module.MODEL_TYPES
    assert "mmfree" in module.QUANT_METHODS
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8}
    config = module.Config.from_hub(sizes | {"num_attention_heads": 2})
    assert config.to_hub()["model_type"] == model_type
    assert module.Config.from_hub(config.to_hub()) == config
    model = module.build(config)
    assert model.config == config
    assert model(mx.array([[1, 2]]))[0].shape == (1, 2, 8)
    assert set(module.WEIGHT_NAMES) != set()


@pytest.mark.parametrize("name", ["llama3", None, 7, "block", "fields", "rotation"])
def test_unknown_architecture_lists_the_known(name: object) -> None:
    with pytest.raises(
        UnsupportedModelError, match="must be one of bitnet, hgrn_bit, llama, qwen3 but"
    ):
        find(name)
