"""Finding architectures, and what each of their files offers."""

import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree import models
from mlx_mmfree.errors import UnsupportedModelError
from mlx_mmfree.layers.matrix import parameters
from mlx_mmfree.models import architecture_of, find, find_described, known_model_types
from mlx_mmfree.models.parts.architecture import WeightNames, known_variants

KNOWN = [
    "big_bird",
    "bitnet",
    "delta_net",
    "fnet",
    "gated_deltanet",
    "gemma3_text",
    "gla",
    "hgrn",
    "hgrn2",
    "hgrn_bit",
    "hybrid",
    "kda",
    "llama",
    "longformer",
    "mamba2",
    "maple",
    "marian",
    "metaformer",
    "minicpm",
    "qwen3",
    "qwen3_5_text",
    "qwen3_moe",
    "reformer",
    "retnet",
    "rwkv7",
]
IMAGES = [
    *("conv2former", "edgenext", "efficientvit", "gmlp", "mlp_mixer", "poolformer", "swiftformer"),
    *("swin", "vit"),
]
ALIASES = {"qwen3_5": "qwen3_5_text", "prism_hadamard_qwen35": "qwen3_5_text"}
"""Names of a model that is written under another."""
ALL = sorted([*KNOWN, *IMAGES, *ALIASES])


def test_known_types() -> None:
    assert known_model_types() == ALL


@pytest.mark.parametrize("model_type", KNOWN)
def test_records_hold_together(model_type: str) -> None:
    architecture = find(model_type)
    assert architecture.name == model_type
    assert "mmfree" in architecture.packed_formats
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


@pytest.mark.parametrize(("name", "written"), ALIASES.items())
def test_second_names_read_a_nested_description(name: str, written: str) -> None:
    architecture, other = find(name), find(written)
    config = other.config.from_hub(other.tiny)
    nested = {**architecture.tiny, "model_type": name, "text_config": dict(other.tiny)}
    assert architecture.config.from_hub(nested).to_hub() == config.to_hub()
    assert config.to_hub()["model_type"] == written
    assert architecture.weight_names == other.weight_names


@pytest.mark.parametrize("name", IMAGES)
def test_records_of_images_hold_together(name: str) -> None:
    architecture = find(name)
    config = architecture.config.from_hub(architecture.tiny)
    written = config.to_hub()
    assert written["architecture"] in architecture.variants
    assert architecture.config.from_hub(written) == config
    assert find_described(written) is architecture
    model = architecture.build(config).eval()
    assert model.config == config
    names = WeightNames(architecture.weight_names)
    for name in parameters(model):
        assert names.to_memory(names.to_disk(name)) == name
    logits = model.predictions(architecture.sample(config))
    assert logits.shape == (1, config.num_classes)
    for variant in architecture.variants:
        config = architecture.config.from_hub({"architecture": variant})
        assert config.to_hub().keys() == {
            "architecture",
            "num_classes",
            "num_features",
            "global_pool",
        }


def test_an_unknown_image_architecture_lists_the_known() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"one of .*, deit_small_patch16_224, .* 'resnet50'"
    ):
        find_described({"architecture": "resnet50"})


@pytest.mark.parametrize("name", ["llama3", None, 7, "block", "fields", "rotation"])
def test_unknown_architecture_lists_the_known(name: object) -> None:
    with pytest.raises(UnsupportedModelError, match=f"must be one of {', '.join(ALL)} but"):
        find(name)


def test_the_readme_lists_all_models_of_images() -> None:
    text = (Path(models.__file__).parent / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[2] for line in text.splitlines() if line.count("|") == 4]
    listed = [name for row in rows[2:] for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == known_variants()
