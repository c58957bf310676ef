"""Keys that a configuration leaves out mean what they mean to the program that it was written for."""

import json
from typing import Any

import pytest

from mlx_mmfree.images import ImageProcessor
from mlx_mmfree.models import architectures, find
from tests.models.make_defaults import FILE, PROCESSORS, of_timm, of_transformers

FROZEN = json.loads(FILE.read_text())
CASES = [
    pytest.param(name, case, id=f"{name}-{number}")
    for program in ("transformers", "flash-linear-attention", "matmulfreellm")
    for name, cases in FROZEN[program]["configurations"].items()
    for number, case in enumerate(cases)
]
WITHOUT_REFERENCE = {"hybrid", "maple", "metaformer", "minicpm"}
"""Architectures of this library alone, or of code that stands beside its checkpoints."""
SECOND_NAMES = {"qwen3_5", "prism_hadamard_qwen35"}
"""Of an architecture that has a reference."""


@pytest.mark.parametrize(("name", "case"), CASES)
def test_absent_keys_are_those_of_the_reference(name: str, case: dict[str, Any]) -> None:
    config = find(name).config
    whole = config.from_hub(case["read"])
    assert config.from_hub(case["given"]) == whole
    for key in case["read"]:
        # what follows from another key is in `given` or follows here too
        without = {k: value for k, value in case["read"].items() if k != key}
        assert config.from_hub(without | case["given"]) == whole, key


def test_every_architecture_of_texts_has_a_reference() -> None:
    of_texts = {name for name, each in architectures().items() if not each.variants}
    named = {case.values[0] for case in CASES}
    assert named == of_texts - WITHOUT_REFERENCE - SECOND_NAMES


def test_pictures_are_prepared_as_by_timm() -> None:
    whole = FROZEN["timm"]["pretrained_cfg"]
    for name, architecture in architectures().items():
        if not architecture.variants:
            continue
        for variant in architecture.variants:
            bare = architecture.config.from_hub({"architecture": variant})
            reported = {"architecture": variant, "pretrained_cfg": whole}
            read = architecture.config.from_hub(reported)
            assert (bare.num_classes, bare.image_size, bare.input_channels) == (
                read.num_classes,
                read.image_size,
                read.input_channels,
            ), name
    assert ImageProcessor.from_config({}) == ImageProcessor.from_config({"pretrained_cfg": whole})


@pytest.mark.parametrize("name", PROCESSORS)
def test_pictures_are_prepared_as_by_transformers(name: str) -> None:
    whole = FROZEN["transformers"]["processors"][name]
    bare = {"image_processor_type": f"{name}ImageProcessor"}
    want = ImageProcessor.from_config(whole)
    assert ImageProcessor.from_config(bare) == want
    for key in whole.keys() - bare.keys():
        without = {k: value for k, value in whole.items() if k != key}
        assert ImageProcessor.from_config(without) == want, key


@pytest.mark.interop
def test_the_frozen_defaults_are_those_of_the_installed_programs() -> None:
    found = of_transformers()
    assert found["configurations"] == FROZEN["transformers"]["configurations"]
    assert found["processors"] == FROZEN["transformers"]["processors"]
    assert of_timm()["pretrained_cfg"] == FROZEN["timm"]["pretrained_cfg"]
