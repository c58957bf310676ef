"""How pictures are scaled, cropped and normalised."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from mlx_mmfree.errors import CheckpointError, ImageError, UnsupportedModelError
from mlx_mmfree.images import ImageProcessor
from mlx_mmfree.images.processor import CROP_MODES, INTERPOLATIONS

VIT = {
    "image_processor_type": "ViTImageProcessor",
    "size": 224,
    "resample": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Smooth waves with noise, so that filters and shifts by a pixel differ."""
    rows, columns = np.mgrid[:height, :width]
    waves = [np.sin(rows / (3 + n)) * np.cos(columns / (5 + n)) for n in range(3)]
    noise = np.random.default_rng(width).normal(0, 20, (height, width, 3))
    pixels = np.clip(np.stack(waves, -1) * 90 + 128 + noise, 0, 255).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def timm_transform(given: Mapping[str, Any]) -> Any:
    timm_data = pytest.importorskip("timm.data")
    config = timm_data.resolve_data_config(pretrained_cfg=dict(given))
    return timm_data.create_transform(**config)


@pytest.mark.interop
@pytest.mark.parametrize("size", [(50, 37), (37, 90), (64, 64), (20, 11), (61, 8)], ids=str)
@pytest.mark.parametrize("crop_mode", CROP_MODES)
@pytest.mark.parametrize("input_size", [(3, 32, 32), (3, 24, 40)], ids=str)
def test_pixels_are_those_of_timm(
    size: tuple[int, int], crop_mode: str, input_size: tuple[int, int, int]
) -> None:
    for number, interpolation in enumerate(INTERPOLATIONS):
        given = {
            "input_size": input_size,
            "crop_mode": crop_mode,
            "interpolation": interpolation,
            "crop_pct": (0.875, 0.9, 0.95, 1.0, 0.97, 1.1)[number],
            "mean": (0.485, 0.456, 0.406),
            "std": (0.229, 0.224, 0.225),
        }
        want = timm_transform(given)(picture(*size)).numpy().transpose(1, 2, 0)
        got = np.array(ImageProcessor.from_config({"pretrained_cfg": given})([picture(*size)]))
        np.testing.assert_array_equal(got[0], want)


@pytest.mark.interop
def test_defaults_and_grey_pictures_are_those_of_timm() -> None:
    want = timm_transform({"num_classes": 5})(picture(300, 260)).numpy().transpose(1, 2, 0)
    for given in ({}, {"pretrained_cfg": {"mean": None, "crop_pct": 0}}, {"input_size": []}):
        got = np.array(ImageProcessor.from_config(given)([picture(300, 260)]))
        np.testing.assert_array_equal(got[0], want)
    grey = {"input_size": (1, 28, 28), "crop_pct": 1.0, "mean": (0.13,), "std": (0.31,)}
    want = timm_transform(grey)(picture(40, 30, "L")).numpy().transpose(1, 2, 0)
    got = np.array(ImageProcessor.from_config(grey)([picture(40, 30, "L")]))
    np.testing.assert_array_equal(got[0], want)


@pytest.mark.interop
@pytest.mark.parametrize("name", ["ViT", "DeiT"])
def test_pixels_are_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    given = {
        **VIT,
        "image_processor_type": f"{name}ImageProcessor",
        "size": {"height": 40, "width": 36},
    }
    if name == "DeiT":
        given |= {"do_center_crop": True, "crop_size": {"height": 32, "width": 30}, "resample": 3}
    theirs = getattr(transformers, f"{name}ImageProcessorPil")(**given)
    want = theirs(picture(50, 37), return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    got = np.array(ImageProcessor.from_config(given)([picture(50, 37)]))
    np.testing.assert_allclose(got[0], want, atol=1e-6)


def test_a_narrow_picture_gets_a_border_of_the_mean() -> None:
    given = {"input_size": (3, 8, 8), "crop_mode": "border", "crop_pct": 1.0}
    given |= {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    processor = ImageProcessor.from_config({"pretrained_cfg": given})
    pixels = np.array(processor([Image.new("RGB", (16, 8))]))[0]
    assert (pixels[2:6] == -1).all()
    assert np.abs(pixels[:2]).max() < 0.01 and np.abs(pixels[6:]).max() < 0.01


def test_a_hundredth_of_a_picture_may_be_cut_out() -> None:
    given = {"input_size": (3, 8, 8), "crop_pct": 0.01}
    assert ImageProcessor.from_config({"pretrained_cfg": given}).scaled_size == (800, 800)


def test_a_batch_of_files_arrays_and_pictures(tmp_path: Path) -> None:
    shown = picture(50, 37)
    shown.save(tmp_path / "shown.png")
    processor = ImageProcessor((16, 24), (20, 30))
    images = processor(
        [str(tmp_path / "shown.png"), tmp_path / "shown.png", np.asarray(shown), shown]
    )
    assert images.shape == (4, 16, 24, 3)
    assert str(images.dtype).endswith("float32")
    assert all(np.array_equal(images[0], image) for image in images)
    grey = ImageProcessor((4, 4), channels=1, mean=(0.0,), std=(1.0,))
    column = np.arange(16, dtype=np.uint8).reshape(4, 4)
    for pixels in (column, column[..., None], np.repeat(column[..., None], 3, -1)):
        np.testing.assert_allclose(np.array(grey([pixels]))[0, ..., 0] * 255, column, rtol=1e-6)


def test_the_view_is_what_the_model_sees() -> None:
    processor = ImageProcessor((16, 24), mean=(0.0,) * 3, std=(1.0,) * 3)
    view = processor.view(picture(50, 37))
    assert view.size == (24, 16)
    got = np.array(processor([picture(50, 37)]))[0] * 255
    np.testing.assert_allclose(got, np.asarray(view), atol=1e-4)


@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1)])
def test_a_long_picture_is_refused_before_it_is_scaled(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image.Image, "resize", lambda *_: pytest.fail("scaled"))
    with pytest.raises(ImageError, match="longer than wide but got"):
        ImageProcessor((224, 224), (256, 256))([Image.new("RGB", size)])
    # one that would keep no pixel of its short side
    with pytest.raises(ImageError, match="longer than wide but got"):
        ImageProcessor((224, 224), crop_mode="border")([Image.new("RGB", size)])


@pytest.mark.parametrize(
    "pixels",
    [np.zeros((4, 4)), np.zeros((4, 4, 2), np.uint8), np.zeros(4, np.uint8), [[1, 2]]],
    ids=["float", "channels", "shape", "list"],
)
def test_other_arrays_are_refused(pixels: Any) -> None:
    with pytest.raises(ValueError, match="'pictures' must be files, pictures of Pillow, or arrays"):
        ImageProcessor((4, 4))([pixels])


def test_mistakes_in_arguments_are_refused() -> None:
    for key, value in (("crop_mode", "middle"), ("interpolation", "cubic"), ("mean", (0.5,))):
        given: dict[str, Any] = {key: value}
        with pytest.raises(ValueError, match=rf"\[ImageProcessor\] '{key}' must "):
            ImageProcessor((4, 4), **given)


def test_no_picture_is_refused() -> None:
    with pytest.raises(ValueError, match="'pictures' must hold at least one"):
        ImageProcessor((4, 4))([])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("input_size", [3, 224]),
        ("input_size", [4, 224, 224]),
        ("input_size", [3, 0, 224]),
        ("input_size", [3, 10**9, 224]),
        ("input_size", [3, 1.5, True]),
        ("crop_pct", 1e-9),
        ("crop_pct", "0.9"),
        ("crop_pct", 5),
        ("crop_pct", float("nan")),
        ("crop_mode", "middle"),
        ("interpolation", "random"),
        ("interpolation", 3),
        ("mean", [0.5, 0.5]),
        ("mean", "0.5"),
        ("mean", [None] * 3),
        ("std", [0.0, 1.0, 1.0]),
        ("std", [float("inf")] * 3),
    ],
)
def test_odd_values_of_timm_are_refused(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"\[ImageProcessor\] '{key}' must be "):
        ImageProcessor.from_config({"pretrained_cfg": {key: value}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("do_resize", False),
        ("rescale_factor", 1 / 127.5),
        ("resample", 9),
        ("resample", True),
        ("size", {"longest_edge": 4}),
        ("size", {"shortest_edge": 224}),
        ("size", None),
        ("image_mean", None),
        ("image_std", [0, 0, 0]),
    ],
)
def test_odd_values_of_transformers_are_refused(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"\[ImageProcessor\] '{key}' must be "):
        ImageProcessor.from_config({**VIT, key: value})


def test_a_model_made_for_other_images_tells_their_size() -> None:
    given = {"pretrained_cfg": {"input_size": [3, 224, 224], "crop_pct": 0.9}}
    processor = ImageProcessor.from_config({**given, "model_args": {"img_size": [96, 64]}})
    assert (processor.size, processor.scaled_size) == ((96, 64), (106, 71))
    assert ImageProcessor.from_config({**given, "model_args": {"img_size": 32}}).size == (32, 32)
    grey = {"pretrained_cfg": {"mean": [0.1], "std": [0.3]}, "model_args": {"in_chans": 1}}
    assert ImageProcessor.from_config(grey).mean == (0.1,)
    for key, value in (("img_size", [1, 2, 3]), ("img_size", "4"), ("img_size", 0)):
        with pytest.raises(CheckpointError, match=rf"'{key}' must be "):
            ImageProcessor.from_config({"model_args": {key: value}})
    with pytest.raises(CheckpointError, match="of 1 or 3 channels but got 4"):
        ImageProcessor.from_config({"model_args": {"in_chans": 4}})
    with pytest.raises(CheckpointError, match="'crop_pct' must be at most the smaller side, 1 but"):
        ImageProcessor.from_config({"crop_pct": 1.5, "model_args": {"img_size": [1, 9]}})
    with pytest.raises(CheckpointError, match="'model_args' must be an object"):
        ImageProcessor.from_config({"model_args": [1]})


def test_other_processors_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="but got 'CLIPImageProcessor'"):
        ImageProcessor.from_config({**VIT, "image_processor_type": "CLIPImageProcessor"})


def test_the_published_formats_of_transformers() -> None:
    assert ImageProcessor.from_config(VIT) == ImageProcessor(
        (224, 224), (224, 224), 3, "squash", "bilinear", (0.5,) * 3, (0.5,) * 3, False
    )
    old = {key: value for key, value in VIT.items() if key != "image_processor_type"}
    poolformer = old | {"feature_extractor_type": "PoolFormerFeatureExtractor", "crop_pct": 0.9}
    processor = ImageProcessor.from_config(poolformer)
    assert (processor.size, processor.scaled_size) == ((224, 224), (248, 248))
    assert processor.crop_mode == "center"


def _numbered(size: int) -> Image.Image:
    """A picture whose red and green tell the row and the column."""
    pixels = np.zeros((size, size, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(size)[:, None], np.arange(size)
    return Image.fromarray(pixels)


@pytest.mark.parametrize(
    ("size", "crop", "first"), [(235, 224, 5), (103, 96, 3), (101, 96, 2), (99, 96, 1)]
)
@pytest.mark.parametrize("kind", ["PoolFormer", "DeiT"])
def test_the_middle_is_cut_out_as_transformers_does(
    kind: str, size: int, crop: int, first: int
) -> None:
    """Both kinds of its processors, in version 5.24."""
    is_exact = kind == "DeiT"
    config = {
        "image_processor_type": f"{kind}ImageProcessor",
        "size": {"height": size, "width": size} if is_exact else {"shortest_edge": crop},
        "crop_size": {"height": crop, "width": crop},
        # what is scaled to the size of the picture stays as it is
        "crop_pct": crop / (size + 0.5),
    }
    view = ImageProcessor.from_config(config).view(_numbered(size))
    assert view.getpixel((0, 0))[:2] == (first, first)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_opened_picture_is_turned_as_its_file(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x112] = orientation
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
    file = str(tmp_path / "p.png")
    Image.fromarray(pixels).save(file, exif=exif)
    processor = ImageProcessor((6, 8), crop_mode="squash", interpolation="nearest")
    with Image.open(file) as picture:
        assert mx.array_equal(processor([picture]), processor([file]))


@pytest.mark.parametrize("mode", ["I;16", "1", "L", "LA", "P", "RGBA", "RGB"])
def test_an_opened_picture_has_the_bits_of_its_file(tmp_path: Path, mode: str) -> None:
    draw = np.random.default_rng(1)
    if mode == "I;16":
        made = Image.fromarray(draw.integers(0, 2**16, (6, 8), np.uint16))
    else:
        made = Image.fromarray(draw.integers(0, 256, (6, 8, 4), np.uint8)).convert(mode)
    file = str(tmp_path / "p.png")
    made.save(file, **({"transparency": 3} if mode == "P" else {}))
    processor = ImageProcessor((6, 8), crop_mode="squash", interpolation="nearest")
    with Image.open(file) as picture:
        assert picture.mode == mode
        assert mx.array_equal(processor([picture]), processor([file]))
