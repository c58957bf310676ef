"""The samples of a fine-tuning run, and the batches that are made of them."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..hub.remote.download import dataset_folder
from ..images import ImageProcessor
from .batches import Batch, SampleBatches, padded_batch
from .fine_tune_settings import FineTuneSettings
from .image_samples import ImageSamples, read_image_samples
from .pairs import pair_batch, read_pairs
from .samples import Samples, find_splits, read_samples


def read_data(
    settings: FineTuneSettings, processor: Any, model: Any = None
) -> dict[str, Samples[Any]]:
    """Reads the samples of each split that `settings.data` has: pairs for preferences.

    Validation is optional: a file for it that has no samples is left out, and a line on stderr says so.

    Args:
        settings: The run.
        processor: The tokenizer, or for images the image processor.
        model: The model, which knows its tokens, or the classes of its images.

    Raises:
        TrainingError: There is no such data, or a line cannot be used.
        DownloadError: The dataset cannot be downloaded from the Hub.
    """
    if isinstance(processor, ImageProcessor):
        return read_image_samples(Path(settings.data), model, processor, settings)
    options: dict[str, Any] = {
        "max_length": settings.max_seq_length,
        "features": settings.features,
        "vocab_size": None if model is None else model.vocab_size,
    }
    read: Callable[..., Samples[Any]] = read_pairs
    if not settings.learns_preferences:
        read, options["mask_prompt"] = read_samples, settings.mask_prompt
    found = {}
    for name, file in find_splits(dataset_folder(settings.data)).items():
        samples = replace(read(file, processor, **options), file=file)
        if name == "valid" and not samples.samples:
            print(
                f"note: '{file}' has no samples to validate on: {samples.summary()}.",
                file=sys.stderr,
            )
        else:
            found[name] = samples
    return found


def training_batches(
    samples: Samples[Any], settings: FineTuneSettings, share: tuple[int, int]
) -> Callable[[int], list[Batch]]:
    """Maps a step to this process' share of its rows, in one batch for each forward pass."""
    samples.check_some()
    in_order = SampleBatches(
        samples.samples,
        settings.batch_size,
        settings.seed,
        settings.max_seq_length - 1 if settings.pack else None,
        share,
        batch_maker(samples, settings),
    )
    parts = settings.grad_accumulation_steps
    return lambda step: [in_order.batch(step * parts + part) for part in range(parts)]


def largest_batch(
    samples: Samples[Any], settings: FineTuneSettings, share: tuple[int, int]
) -> Batch:
    """A batch of this process that is as large as the largest of the run."""
    batches = training_batches(samples, settings, share)
    if settings.pack:
        return batches(0)[0]
    rows = settings.batch_size // share[1]
    longest = sorted(samples.samples, key=lambda sample: -sample.length)[:rows]
    # samples come again where a batch has more rows than there are samples
    return batch_maker(samples, settings)([longest[n % len(longest)] for n in range(rows)])


def batch_maker(
    samples: Samples[Any], settings: FineTuneSettings
) -> Callable[[Sequence[Any]], Batch]:
    """What makes a batch of some samples, or of some pairs."""
    if isinstance(samples, ImageSamples):
        return samples.batch
    return pair_batch if settings.learns_preferences else padded_batch
