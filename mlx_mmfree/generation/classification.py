"""The classes of texts and images, by a model that sorts them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..images import ImageProcessor
from ..images.imagenet import imagenet_names
from ..models import ImageClassifier, SequenceClassifier
from ..models.parts.tokens import check_length, token_array


@dataclass(frozen=True)
class Classes:
    """What one input may belong to.

    Attributes:
        labels: The likeliest classes, best first.
        probabilities: Their probabilities.
    """

    labels: list[str]
    probabilities: list[float]


def classify(
    model: SequenceClassifier,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    top_k: int = 5,
    progress: Callable[[int], object] = lambda _: None,
) -> list[Classes]:
    """The likeliest classes of each text.

    Args:
        model: Gives the logits.
        tokenizer: Belongs to the model.
        texts: The texts.
        top_k: Number of classes for each, at most.
        progress: Called with the number of texts that are done.

    Raises:
        ValueError: A text holds no token or is too long, or the number is not positive.

    Example:
        >>> model, tokenizer = load("run/model")  # doctest: +SKIP
        >>> classify(model, tokenizer, ["The cat sat."])[0].labels  # doctest: +SKIP
        ['animals', 'plants']
    """
    found = []
    for done, text in enumerate(texts, 1):
        ids = tokenizer.encode(text)
        check_length(len(ids), model.context_length)
        tokens = token_array(ids, model.vocab_size)
        found.append(likeliest(model(tokens)[0], model.labels, top_k))
        progress(done)
    return found


def classify_images(
    model: ImageClassifier,
    processor: ImageProcessor,
    pictures: Sequence[Any],
    *,
    labels: Sequence[str] = (),
    top_k: int = 5,
    batch_size: int = 8,
    progress: Callable[[int], object] = lambda _: None,
) -> list[Classes]:
    """The likeliest classes of each image.

    Args:
        model: Gives the logits.
        processor: Belongs to the model.
        pictures: Names of files, or what else the processor takes.
        labels: A name for each class. Without them classes are called as the checkpoint says. Those of
            timm that were trained on ImageNet leave its names out, and get them; others get numbers.
        top_k: Number of classes for each, at most.
        batch_size: Number of images that the model reads at once.
        progress: Called with the number of images that are done.

    Raises:
        ImageError: A picture cannot be read.
        UnsupportedModelError: The model has no classes.
        ValueError: There is not one name for each class, or a number is not positive.

    Example:
        >>> model, processor = load("timm/edgenext_xx_small.in1k")  # doctest: +SKIP
        >>> classify_images(model, processor, ["cat.jpg"])[0].labels[0]  # doctest: +SKIP
        'tabby'
    """
    if batch_size < 1:
        raise ValueError(f"[classify] 'batch_size' must be positive but got {batch_size}.")
    model.check_classes("classify")
    found: list[Classes] = []
    for start in range(0, len(pictures), batch_size):
        logits = model(processor(pictures[start : start + batch_size]))
        names = labels or class_names(model, logits.shape[-1])
        if len(names) != logits.shape[-1]:
            raise ValueError(
                f"[classify] 'labels' must have a name for each of {logits.shape[-1]} classes but has "
                f"{len(names)}."
            )
        found += [likeliest(each, names, top_k) for each in logits]
        progress(len(found))
    return found


def class_names(model: ImageClassifier, count: int) -> list[str]:
    """The names of a model's classes, or their numbers.

    Args:
        model: The model.
        count: Number of its classes.
    """
    names = list(getattr(model.config, "labels", ()))
    names = names or imagenet_names(getattr(model.config, "pretrained_cfg", {}), count)
    return names or [str(number) for number in range(count)]


def likeliest(logits: mx.array, labels: Sequence[str], top_k: int) -> Classes:
    """The classes with the largest logits.

    Args:
        logits: A logit for each class, `(K,)`.
        labels: Their names.
        top_k: Number of classes, at most.

    Raises:
        ValueError: The number is not positive.
    """
    if top_k < 1:
        raise ValueError(f"[classify] 'top_k' must be positive but got {top_k}.")
    chances = mx.softmax(logits.astype(mx.float32), axis=-1, precise=True)
    order: list[int] = mx.argsort(-chances)[:top_k].tolist()  # type: ignore[assignment]
    probabilities: list[float] = chances[mx.array(order)].tolist()  # type: ignore[assignment]
    return Classes([labels[number] for number in order], probabilities)
