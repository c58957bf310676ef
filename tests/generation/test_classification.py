"""The classes of images."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mmfree.generation.predictions import class_names, classify_images
from mlx_mmfree.images import ImageProcessor
from mlx_mmfree.models import ImageClassifier
from mlx_mmfree.models.parts.image_classifier import Stage

PROCESSOR = ImageProcessor((2, 2), mean=(0.0,) * 3, std=(1.0,) * 3)
COLOURS = [np.full((2, 2, 3), colour, np.uint8) for colour in ((200, 9, 90), (1, 2, 3), (9, 90, 0))]


def classifier(**config: Any) -> ImageClassifier:
    """Its logits are the means of an image's colours."""
    return ImageClassifier(
        nn.Identity(), [Stage([])], nn.Identity(), config=SimpleNamespace(**config)
    )


def test_each_image_in_any_batch() -> None:
    labels = ["red", "green", "blue"]
    seen: list[int] = []
    for size in (1, 2, 3):
        found = classify_images(
            classifier(labels=labels),
            PROCESSOR,
            COLOURS,
            top_k=2,
            batch_size=size,
            progress=seen.append,
        )
        assert [each.labels for each in found] == [
            ["red", "blue"],
            ["blue", "green"],
            ["green", "red"],
        ]
        want = mx.softmax(mx.array([200.0, 9, 90]) / 255).tolist()
        assert found[0].probabilities == pytest.approx([want[0], want[2]], rel=1e-6)
    assert seen == [1, 2, 3, 2, 3, 3]


def test_names_come_from_the_caller_the_checkpoint_or_imagenet() -> None:
    model = classifier(labels=("a", "b", "c"))
    assert classify_images(model, PROCESSOR, COLOURS[:1], labels="xyz")[0].labels == ["x", "z", "y"]
    assert class_names(model, 3) == ["a", "b", "c"]
    assert class_names(classifier(), 3) == ["0", "1", "2"]
    of_imagenet = classifier(labels=(), pretrained_cfg={"tag": "in1k"})
    assert class_names(of_imagenet, 1000)[1] == "goldfish"
    assert class_names(of_imagenet, 3) == ["0", "1", "2"]


def test_mistakes() -> None:
    for given in ({"labels": ["a"]}, {"batch_size": 0}, {"top_k": 0}):
        options: dict[str, Any] = given
        with pytest.raises(ValueError, match=rf"\[classify\] '{next(iter(given))}' must "):
            classify_images(classifier(), PROCESSOR, COLOURS, **options)
