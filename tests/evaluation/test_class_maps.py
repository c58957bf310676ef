"""Maps of classes: a linear model's are known, and every image model has some."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mmfree.evaluation.maps import class_maps
from mlx_mmfree.hub import load_model
from mlx_mmfree.models import ImageClassifier, architectures, find
from mlx_mmfree.models.parts.image_classifier import Stage
from mlx_mmfree.models.parts.stack import Stack
from tests.hub.timm_models import TINY, images, timm_model, write_folder
from tests.tolerances import GRADIENT_TOLERANCE

IMAGES = [
    name
    for name, architecture in architectures().items()
    if "architecture" in (architecture.tiny or {})
]


def scaled(maps: np.ndarray) -> np.ndarray:
    maps = np.maximum(maps, 0)
    return maps / maps.max(axis=(1, 2), keepdims=True)


class Doubled(nn.Module):
    def __call__(self, x: mx.array) -> mx.array:
        return 2 * x


def linear_model() -> ImageClassifier:
    """Sorts by the mean of all positions, before which a block doubles them."""
    mx.random.seed(0)
    return ImageClassifier(nn.Identity(), [Stage([Doubled(), Doubled()])], nn.Linear(4, 3))


def test_maps_of_a_linear_model_are_its_weights_times_its_positions() -> None:
    model = linear_model()
    images = mx.random.normal((2, 5, 6, 4), key=mx.random.key(1))
    for classes in ([0, 0], [2, 1]):
        weights = np.array(model.head.weight)[classes]
        want = scaled(np.einsum("bhwd,bd->bhw", np.array(images), weights))
        np.testing.assert_allclose(class_maps(model, images, classes), want, atol=1e-5)
    likeliest = np.array(mx.argmax(model(images), axis=-1)).tolist()
    assert np.array_equal(class_maps(model, images), class_maps(model, images, likeliest))


def test_a_class_for_which_nothing_speaks_has_an_empty_map() -> None:
    model = linear_model()
    model.head.weight = -mx.ones((3, 4))
    maps = class_maps(model, mx.ones((1, 2, 3, 4)))
    assert maps.shape == (1, 2, 3) and not maps.any()


@pytest.mark.parametrize("name", IMAGES)
def test_every_model_of_images_has_maps(name: str) -> None:
    architecture = find(name)
    mx.random.seed(0)
    config = architecture.config.from_hub(architecture.tiny)
    model = architecture.build(config).eval()
    images = mx.random.normal((3, *config.image_size, config.input_channels))
    logits = model(images)
    maps = [class_maps(model, images, [number] * 3) for number in range(logits.shape[-1])]
    assert all(each.shape == maps[0].shape and each.shape[0] == 3 for each in maps)
    assert np.isfinite(maps).all() and np.min(maps) >= 0
    # each image has a position that speaks for some class
    assert (np.max(maps, axis=(0, 2, 3)) == 1).all()
    assert mx.array_equal(model(images), logits)


@pytest.mark.parametrize("depth", [2, 3])
def test_selected_tokens_keep_their_positions(depth: int) -> None:
    architecture = find("vit")
    given = {
        **architecture.tiny,
        "model_args": {**architecture.tiny["model_args"], "depth": depth},
        "token_selection": {"keep": 0.5, "hidden_dims": 4},
    }
    mx.random.seed(0)
    model = architecture.build(architecture.config.from_hub(given)).eval()
    images = mx.random.normal((2, 32, 32, 3))
    maps = [class_maps(model, images, [number] * 2) for number in range(5)]
    assert maps[0].shape == (2, 4, 4) and np.max(maps) == 1
    x = model.until_last_block(images)
    assert mx.array_equal(model.from_last_block(x), model(images))


def test_maps_of_an_image_of_another_size() -> None:
    architecture = find("vit")
    model = architecture.build(architecture.config.from_hub(architecture.tiny)).eval()
    assert class_maps(model, mx.random.normal((1, 48, 24, 3))).shape == (1, 6, 3)


def test_maps_of_an_image_do_not_depend_on_the_others() -> None:
    architecture = find("vit")
    model = architecture.build(architecture.config.from_hub(architecture.tiny)).eval()
    images = mx.random.normal((3, 32, 32, 3))
    maps = class_maps(model, images, [1, 2, 3])
    assert maps.shape == (3, 4, 4)
    alone = class_maps(model, images[1:2], [2])
    np.testing.assert_allclose(alone, maps[1:2], atol=GRADIENT_TOLERANCE)


@pytest.mark.interop
@pytest.mark.parametrize("name", ["vit", "swin", "edgenext"])
def test_maps_are_those_of_torch(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    # of small images few positions are left
    case = TINY[name]._replace(size=(130, 97)) if name == "edgenext" else TINY[name]
    theirs = timm_model(case)
    write_folder(tmp_path, case, theirs)
    entering = []

    def note(block: object, values: tuple[Any, ...]) -> None:
        values[0].retain_grad()
        entering.append(values[0])

    stages = getattr(theirs, "layers", None) or getattr(theirs, "stages", [theirs])
    stages[-1].blocks[-1].register_forward_pre_hook(note)
    pixels = images(case.size)
    theirs(torch.tensor(pixels.transpose(0, 3, 1, 2)))[:, 1].sum().backward()
    [x] = entering
    positions, gradient = x.detach().numpy(), x.grad.numpy()
    if name == "edgenext":
        positions, gradient = positions.transpose(0, 2, 3, 1), gradient.transpose(0, 2, 3, 1)
    got = class_maps(load_model(tmp_path), mx.array(pixels), [1] * len(pixels))
    if name == "vit":
        # the class token has no position
        positions, gradient = (
            each[:, 1:].reshape(*got.shape, -1) for each in (positions, gradient)
        )
    want = np.einsum("bhwd,bd->bhw", positions, gradient.mean(axis=(1, 2)))
    np.testing.assert_allclose(got, scaled(want), atol=GRADIENT_TOLERANCE)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="'classes' must be one for each of 2 images but got"):
        class_maps(linear_model(), mx.ones((2, 2, 3, 4)), [1])
    with pytest.raises(ValueError, match="'grid_of' of its embedding, but Identity does not"):
        class_maps(linear_model(), mx.ones((2, 6, 4)))
    stack = Stack([], nn.RMSNorm(4))
    with pytest.raises(ValueError, match="must be a 'Stage' of blocks of images but is a Stack"):
        class_maps(ImageClassifier(nn.Identity(), [stack], nn.Linear(4, 3)), mx.ones((2, 6, 4)))


@pytest.mark.plot
@pytest.mark.parametrize("count", [1, 5])
def test_picture(count: int, tmp_path: Path) -> None:
    from matplotlib.image import imread

    from mlx_mmfree.evaluation.maps import draw_class_maps

    file = tmp_path / "maps.png"
    views = [np.full((20, 30, 3), 40 * n, np.uint8) for n in range(count)]
    maps = [np.eye(3, 4, dtype=np.float32)] * count
    # names may hold letters that the font lacks, formulas and more than there is space for
    titles = ["a \u732b\U0001f408 $\\nonsense{$ " + "x" * 99] * count
    draw_class_maps(views, maps, titles, file)
    height, width, _ = imread(file).shape
    assert width > height
