"""The names of ImageNet's classes, and for which models they are taken."""

import pytest

from mlx_mmfree.images.processor import imagenet_names


@pytest.mark.parametrize("tag", ["in1k", "usi_in1k", "goog_in21k_ft_in1k"])
def test_models_that_were_trained_on_them_last_get_names(tag: str) -> None:
    names = imagenet_names({"tag": tag}, 1000)
    assert len(set(names)) == 1000
    assert names[0] == "tench" and names[281] == "tabby" and names[999] == "toilet tissue"


@pytest.mark.parametrize("given", [({"tag": "in1k"}, 10), ({"tag": "in21k"}, 1000), ({}, 1000)])
def test_other_models_get_none(given: tuple[dict[str, str], int]) -> None:
    assert imagenet_names(*given) == []


@pytest.mark.interop
def test_names_are_those_of_torchvision() -> None:
    models = pytest.importorskip("torchvision.models")
    want = models.ResNet18_Weights.IMAGENET1K_V1.meta["categories"]
    assert imagenet_names({"tag": "in1k"}, 1000) == want
