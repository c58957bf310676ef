"""The samples of a fine-tuning run, and the batches that are made of them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import TrainingError
from ...files.reading import expanded
from ...hub.remote.datasets import SPLITS, names_split, split_files
from ...images import ImageProcessor
from ...models import ImageClassifier
from ..batches import Batch, SampleBatches, padded_batch
from ..corpus.splits import FORMATS, dataset_splits, find_split, find_splits
from ..image_sets import LabelledImage, digest_of, read_images
from ..samples import COUNTS, Samples, read_samples
from ..tasks.samples import ImageBatch, image_batch
from .preferences import pair_batch, read_pairs
from .rollouts import Problems, largest_group_batch, read_problems, rewards_of
from .settings import GRPO, FineTuneSettings

_OF_TEXTS = (
    "train_mode",
    "teacher",
    "mask_prompt",
    "pack",
    "grad_checkpoint",
    "valid_share",
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
                f"[lora] '{name}' must be left out for an image model but got "
                f"{getattr(settings, name)!r:.80}."
            )
    model.check_classes("lora")
    found: dict[str, Samples[Any]] = {}
    for split in SPLITS:
        path = find_split(folder, split, ("", ".npz"))
        if path is not None:
            images = read_images(path, model.config.labels, model.num_logits)
            found[split] = ImageSamples(images, processor=processor, digest=digest_of(path))
    if not found:
        raise TrainingError(
            f"[data] 'data' must be a folder with train, valid or test, each a folder of classes or an "
            f".npz file, for an image model, but '{folder}' has none of them."
        )
    return found


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
    vocab_size = None if model is None else model.vocab_size
    options: dict[str, Any] = {
        "max_length": settings.max_seq_length,
        "features": settings.features,
        "vocab_size": vocab_size,
    }
    read: Callable[..., Samples[Any]] = read_pairs
    if settings.train_mode == GRPO:
        read = read_problems
        options = {"settings": settings, "rewards": rewards_of(settings), "vocab_size": vocab_size}
    elif not settings.learns_preferences:
        read, options["mask_prompt"] = read_samples, settings.mask_prompt
    found = {}
    for name, files in _files(settings.data).items():
        samples = replace(read(files[0], processor, **options), file=files[0])
        for file in files[1:]:
            samples.add(read(file, processor, **options))
        if name == "valid" and not samples.samples:
            print(
                f"note: '{files[0]}' has no samples to validate on: {samples.summary()}.",
                file=sys.stderr,
            )
        else:
            found[name] = samples
    if settings.valid_share and "train" in found:
        found |= _shared(found, settings.valid_share)
    return found


def _shared(found: dict[str, Samples[Any]], share: float) -> dict[str, Samples[Any]]:
    """The training samples without a share of them, and that share to validate on."""
    if "valid" in found:
        print(
            "note: the share to validate on has no effect, since the data has samples for it.",
            file=sys.stderr,
        )
        return {}
    train = found["train"]
    every = train.samples
    count = max(1, round(share * len(every)))
    taken = {n * len(every) // count for n in range(count)}
    rest = [sample for n, sample in enumerate(every) if n not in taken]
    if not rest:
        raise TrainingError(
            f"[data] 'valid_share' must leave samples to learn from but {share} of {len(every)} leaves "
            "none. Give more samples or a smaller share."
        )
    # what was cut or left out is reported of the training samples
    validation = replace(train, samples=[every[n] for n in sorted(taken)])
    for name in COUNTS:
        setattr(validation, name, 0)
    return {"train": replace(train, samples=rest), "valid": validation}


def _files(data: str) -> dict[str, list[Path]]:
    """The files of each split: of a folder or dataset, or the training samples of a file or a split."""
    path = expanded(data)
    if path.is_file():
        return {"train": [path]}
    if names_split(data):
        return {"train": [file.fetch() for file in split_files(data, FORMATS)]}
    return find_splits(path) if path.is_dir() else dataset_splits(data)


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
    if isinstance(samples, Problems):
        return largest_group_batch(samples, settings, share)
    batches = training_batches(samples, settings, share)
    if settings.pack:
        return batches(0)[0]
    rows = settings.batch_size // share[1]
    longest = sorted(samples.samples, key=lambda sample: -sample.length)[:rows]
    # samples come again where a batch has more rows than there are samples
    return batch_maker(samples, settings)([longest[n % len(longest)] for n in range(rows)])


def describe_step(samples: Samples[Any], settings: FineTuneSettings, unit: str) -> str:
    """A sentence on how much a step learns from."""
    rows = settings.batch_size * settings.grad_accumulation_steps
    if isinstance(samples, Problems):
        return f"A step learns from {rows:,} answers, {settings.num_generations} to a prompt."
    if settings.pack:
        return (
            f"A step learns from {rows:,} rows of at most {settings.max_seq_length - 1:,} tokens."
        )
    if unit == "images":
        return f"A step learns from {rows:,} images."
    tokens = sum(len(text.tokens) for sample in samples.samples for text in sample.texts)
    mean = rows * tokens / len(samples.samples)
    plural = "" if rows == 1 else "s"
    return f"A step learns from {rows:,} sample{plural}, about {mean:,.0f} {unit}."


def batch_maker(
    samples: Samples[Any], settings: FineTuneSettings
) -> Callable[[Sequence[Any]], Batch]:
    """The function that makes a batch of some samples, or of some pairs."""
    if isinstance(samples, ImageSamples):
        return samples.batch
    return pair_batch if settings.learns_preferences else padded_batch
