"""Sorting images into classes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from ...images import ImageProcessor
from ..batches import Batch
from ..image_sets.image_set import LabelledImage, digest_of, read_images
from ..loss import smoothed_cross_entropy
from ..settings import Settings
from .sample_task import SampleTask


class ImageBatch(Batch):
    """Images and their classes.

    Attributes: as `Batch`, but inputs are float32 `(B, H, W, C)`, targets and weights `(B, 1)`.
    """


def image_batch(processor: ImageProcessor, samples: Sequence[LabelledImage]) -> ImageBatch:
    """The batch of some images, prepared for a model."""
    images = np.array(processor([sample.picture for sample in samples]))
    targets = np.array([[sample.label] for sample in samples], np.int32)
    return ImageBatch(images, targets, np.ones(targets.shape, np.float32))


class ImageTask(SampleTask):
    """A model of images learns their labels.

    What chance does to training images depends on the seed and the step alone.

    Args: as for `Task`.
    """

    unit: ClassVar[str] = "images"
    reads_text: ClassVar[bool] = False

    def __init__(
        self, settings: Settings, model: Any, tokenizer: Path | None, share: tuple[int, int]
    ):
        self._processor = ImageProcessor.from_config(model.config.to_hub())
        super().__init__(settings, model, tokenizer, share)

    @classmethod
    def logits(cls, model: Any, batch: Batch) -> mx.array:
        logits: mx.array = model(mx.array(batch.inputs))
        return logits[:, None]

    @classmethod
    def losses(cls, model: Any, batch: Batch, label_smoothing: float) -> mx.array:
        targets = mx.array(batch.targets)
        losses = smoothed_cross_entropy(cls.logits(model, batch), targets, label_smoothing)
        return losses * mx.array(batch.weights)

    @classmethod
    def largest_batch(cls, settings: Settings, model: Any, rows: int) -> Batch:
        shape = (rows, *model.config.image_size, model.config.input_channels)
        targets = np.zeros((rows, 1), np.int32)
        return ImageBatch(np.zeros(shape, np.float32), targets, np.ones(targets.shape, np.float32))

    def batches(self, step: int) -> list[Batch]:
        settings, (rank, ranks) = self._settings, self._share
        key = np.random.SeedSequence([settings.seed, step])
        draw = np.random.Generator(np.random.Philox(key))
        found = []
        for batch in super().batches(step):
            # drawn for all processes, so that their number changes nothing
            shifts = draw.integers(
                -settings.random_shift, settings.random_shift + 1, (settings.batch_size, 2)
            )[rank::ranks]
            flips = draw.random(settings.batch_size)[rank::ranks] < settings.random_flip / 2
            images = moved(mirrored(batch.inputs, flips), shifts)
            found.append(replace(batch, inputs=images))
        return found

    def _batch(self, samples: Sequence[LabelledImage]) -> Batch:
        return image_batch(self._processor, samples)

    def _digest(self, name: str) -> str:
        return digest_of(self._settings.path(name))

    def _read(self, name: str) -> list[LabelledImage]:
        model = self._model
        return read_images(self._settings.path(name), model.config.labels, model.num_logits)


def mirrored(images: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Some of the images `(B, H, W, C)` with left and right exchanged."""
    return (
        np.where(which[:, None, None, None], images[:, :, ::-1], images) if which.any() else images
    )


def moved(images: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Images `(B, H, W, C)`, each moved by `(B, 2)` pixels down and right; the edges are repeated."""
    if not shifts.any():
        return images
    rows = np.arange(images.shape[1]) - shifts[:, :1]
    columns = np.arange(images.shape[2]) - shifts[:, 1:]
    rows, columns = (
        np.clip(places, 0, size - 1)
        for places, size in zip((rows, columns), images.shape[1:3], strict=True)
    )
    place = np.arange(len(images))[:, None, None]
    return images[place, rows[:, :, None], columns[:, None]]
