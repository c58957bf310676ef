"""The labelled images of a fine-tuning run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import TrainingError
from ..images import ImageProcessor
from ..models import ImageClassifier
from .fine_tune_settings import FineTuneSettings
from .image_sets.image_set import LabelledImage, digest_of, read_images
from .samples import SPLITS, Samples
from .tasks.images import ImageBatch, image_batch

_OF_TEXTS = (
    "train_mode",
    "teacher",
    "mask_prompt",
    "pack",
    "grad_checkpoint",
)


@dataclass
class ImageSamples(Samples[Any]):
    """The images of one split.

    Attributes: as `Samples`, and
        processor: Prepares them.
        digest: Tells their content.
    """

    processor: ImageProcessor = field(kw_only=True)
    digest: str = field(kw_only=True)

    def summary(self) -> str:
        return f"{len(self.samples):,} images"

    def content(self) -> Iterator[bytes]:
        yield self.digest.encode()

    def batch(self, samples: Sequence[LabelledImage]) -> ImageBatch:
        return image_batch(self.processor, samples)


def read_image_samples(
    folder: Path, model: ImageClassifier, processor: ImageProcessor, settings: FineTuneSettings
) -> dict[str, Samples[Any]]:
    """Reads the images of each split that a folder has: a folder `train` of classes, or `train.npz`.

    Raises:
        TrainingError: They cannot be read or are of other classes than the model's, or a setting is
            for texts.
        UnsupportedModelError: The model has no classes.
    """
    for name in _OF_TEXTS:
        if getattr(settings, name) != FineTuneSettings.__dataclass_fields__[name].default:
            raise TrainingError(
                f"[lora] '{name}' must be left out for a model of images but got "
                f"{getattr(settings, name)!r:.80}."
            )
    model.check_classes("lora")
    found: dict[str, Samples[Any]] = {}
    for split in SPLITS:
        places = [folder / split, folder / f"{split}.npz"]
        place = next((place for place in places if place.exists()), None)
        if place is not None:
            images = read_images(place, model.config.labels, model.num_logits)
            found[split] = ImageSamples(images, processor=processor, digest=digest_of(place))
    if not found:
        raise TrainingError(
            f"[data] 'data' must be a folder with train, valid or test, each a folder of classes or an "
            f".npz file, for a model of images, but '{folder}' has none of them."
        )
    return found
