"""Models of images: what their descriptions may say, and that all of them learn."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.models import find
from mlx_mmfree.models.parts.ternary_linears import TernaryLinears
from tests.models.test_architectures import IMAGES


def built(name: str, **changes: Any) -> nn.Module:
    architecture = find(name)
    config = architecture.config.from_hub({**architecture.tiny, **changes})
    mx.random.seed(0)
    model: nn.Module = architecture.build(config)
    return model


TERNARY = {"quantization_config": TernaryLinears(norm_eps=1e-6).to_hub()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("changes", [{}, TERNARY], ids=["dense", "ternary"])
@pytest.mark.parametrize("name", IMAGES)
def test_every_parameter_learns(name: str, changes: dict[str, Any]) -> None:
    model = built(name, **changes)
    assert any(matrix.is_ternary for matrix in matrices(model).values()) == bool(changes)
    images = mx.random.normal((4, *model.config.image_size, 3))
    classes = mx.arange(4)

    def loss() -> mx.array:
        return nn.losses.cross_entropy(model(images), classes, reduction="mean")

    _, gradients = nn.value_and_grad(model, loss)()
    for path, gradient in tree_flatten(gradients):
        largest = mx.abs(gradient).max().item()
        assert 0 < largest < float("inf"), path


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("edgenext", {"dims": [8, 16, 24]}, "'dims' must be a list of 4 numbers"),
        ("edgenext", {"heads": [2, 2, 5, 2]}, "'heads' must divide 'dims'"),
        ("edgenext", {"dims": [8, 16, 24, 6]}, "'dims' must leave channels for 4 groups"),
        ("efficientvit", {"head_dim": 5}, "'head_dim' must divide the last two"),
        ("efficientvit", {"depths": [9, 1, 1, 1, 1]}, "'depths' must begin with at most 8"),
        ("swiftformer", {"layers": [1, 1, 1, 0]}, "'layers' must be a whole number from 1"),
        ("poolformer", {"depths": "deep"}, "'depths' must be a list of 4 numbers"),
        ("conv2former", {"kernel_size": 4}, "'kernel_size' must be odd"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    given = find(name).tiny["model_args"]
    with pytest.raises(CheckpointError, match=message):
        built(name, model_args={**given, **arguments})


@pytest.mark.parametrize("name", IMAGES)
def test_the_size_of_images_is_written_where_timm_reads_it(name: str) -> None:
    kind = find(name).config
    config = kind.from_hub({**find(name).tiny, "model_args": {"img_size": [48, 64]}})
    written = config.to_hub()
    assert kind.from_hub(written).image_size == (48, 64)
    if kind.has_fixed_size:
        assert written["model_args"]["img_size"] == [48, 64]
    else:
        assert "model_args" not in written
        assert written["pretrained_cfg"]["input_size"] == [3, 48, 64]


@pytest.mark.parametrize("name", IMAGES)
def test_training_leaves_out_branches(name: str) -> None:
    model = built(name, model_args={**find(name).tiny.get("model_args", {}), "drop_path_rate": 0.9})
    images = mx.random.normal((8, *model.config.image_size, 3))

    def is_the_same() -> bool:
        return mx.array_equal(model.features(images), model.features(images)).item()

    # the statistics of the batch are the same both times
    assert not is_the_same()
    model.eval()
    assert is_the_same()
