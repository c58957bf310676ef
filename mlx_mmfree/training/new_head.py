"""The classes of a model of images: those of the files that it learns from."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlx.utils import tree_unflatten

from ..errors import TrainingError
from ..layers.matrix import parameters
from ..models import ImageClassifier, architecture_of, find_described
from .image_sets.image_set import read_classes
from .settings import Settings


def described_classes(description: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The description of a new model of images, with the classes of the training files.

    It also says how pictures are prepared, unless it does so itself: the middle square is scaled to the
    size of the model, and values lie from -1 to 1.

    Raises:
        TrainingError: The files cannot be read, or do not agree.
        CheckpointError, UnsupportedModelError: As for `ImageConfig.from_hub`.
    """
    described = dict(description)
    if not {"num_classes", "label_names"} & described.keys():
        count, names = _classes(settings)
        described |= {"num_classes": count, **({"label_names": list(names)} if names else {})}
    elif "num_classes" not in described and isinstance(described["label_names"], list):
        described["num_classes"] = len(described["label_names"])
    if "pretrained_cfg" not in described:
        config = find_described(described).config.from_hub(described)
        described["pretrained_cfg"] = {
            "input_size": [config.input_channels, *config.image_size],
            "fixed_input_size": config.has_fixed_size,
            "crop_pct": 1.0,
            "interpolation": "bicubic",
            "mean": [0.5] * config.input_channels,
            "std": [0.5] * config.input_channels,
        }
    return described


def with_classes(model: ImageClassifier, settings: Settings) -> ImageClassifier:
    """A model with other classes, those of the training files, and all weights that know of none.

    Raises:
        TrainingError: The files cannot be read, or do not agree.
    """
    count, names = _classes(settings)
    config = replace(
        model.config, num_classes=count, label_names=tuple(names), label_descriptions={}
    )
    build = architecture_of(config).build
    new: ImageClassifier = build(config)
    # weights of classes are those whose number the classes change
    larger = parameters(build(replace(config, num_classes=count + 1, label_names=())))
    known = parameters(model)
    kept = [
        (name, known[name])
        for name, array in parameters(new).items()
        if array.shape == larger[name].shape
    ]
    new.update(tree_unflatten(kept))
    new.rounding = model.rounding
    return new


def _classes(settings: Settings) -> tuple[int, tuple[str, ...]]:
    """How many classes the training files have, and what they are called, if they say so."""
    files = sorted({name for stage in settings.stages for name in stage.weights})
    found = [read_classes(settings.path(name)) for name in files]
    names = {name for _, each in found for name in each}
    if names and not all(each for _, each in found):
        silent = next(file for file, (_, each) in zip(files, found, strict=True) if not each)
        raise TrainingError(
            f"[data] '{silent}' must say what its classes are called, as other training files do, but "
            "does not. Name them under 'label_names' of 'model'."
        )
    # numbered in the order of the first file, which may be a file of arrays with an order of its own
    ordered = dict.fromkeys(name for _, each in found for name in each)
    return len(ordered) or max(count for count, _ in found), tuple(ordered)
