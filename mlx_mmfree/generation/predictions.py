"""Predictions for a whole input in one pass: classes of texts and images, words for masks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..images import ImageProcessor
from ..images.processor import imagenet_names
from ..models import ImageClassifier, MaskedLM, SequenceClassifier
from ..models.parts.token_checks import check_length, check_tokens, token_array
from ..ops import log_softmax
from .prompts import check_text_length


@dataclass(frozen=True)
class Classes:
    """A class that one input may belong to.

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
        check_text_length(tokenizer, text, model.context_length)
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
        labels: A name for each class; by default the checkpoint's. Checkpoints of timm that were
            trained on ImageNet leave its names out, and get them; others get numbers.
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


@dataclass(frozen=True)
class Filling:
    """The likeliest words for one mask.

    Attributes:
        tokens: The likeliest tokens, best first.
        words: Their texts.
        probabilities: Their probabilities.
    """

    tokens: list[int]
    words: list[str]
    probabilities: list[float]


def fill(model: MaskedLM, tokenizer: Any, text: str, *, top_k: int = 5) -> list[Filling]:
    """The likeliest tokens for each mask of a text, each mask by itself.

    Args:
        model: Gives the logits.
        tokenizer: Belongs to the model.
        text: Spells the mask token of the tokenizer where a word is missing.
        top_k: Number of tokens for each mask.

    Returns:
        One result for each mask, in the order of the text.

    Raises:
        ValueError: The tokenizer has no mask token, the text has no mask, is too long or has a token
            that the model lacks, or the number is not positive.

    Example:
        >>> model, tokenizer = load("google/fnet-base")  # doctest: +SKIP
        >>> fill(model, tokenizer, "Paris is the [MASK] of France.")[0].words  # doctest: +SKIP
        ['capital', 'city', 'heart', 'center', 'centre']
    """
    if top_k < 1:
        raise ValueError(f"[fill] 'top_k' must be positive but got {top_k}.")
    mask = tokenizer.mask_token_id
    if mask is None:
        raise ValueError(
            "[fill] 'tokenizer' must name a mask token but names none. Use a model that fills in masks."
        )
    check_text_length(tokenizer, text, model.context_length)
    ids = tokenizer.encode(text, parse_special=True)
    positions = [n for n, token in enumerate(ids) if token == mask]
    if not positions:
        raise ValueError(
            f"[fill] 'text' must hold {tokenizer.id_to_piece(mask)!r} where a word is missing but holds "
            "none."
        )
    check_length(len(ids), model.context_length)
    check_tokens(ids, model.vocab_size)
    logits = model(mx.array([ids]))[0, mx.array(positions)].astype(mx.float32)
    scores = log_softmax(logits)
    order = mx.argsort(-scores, axis=-1)[:, : min(top_k, scores.shape[-1])]
    chances = mx.exp(mx.take_along_axis(scores, order, axis=-1))
    rows: list[list[int]] = order.tolist()  # type: ignore[assignment]
    probabilities: list[list[float]] = chances.tolist()  # type: ignore[assignment]
    return [
        Filling(tokens, [tokenizer.decode([token]).strip() for token in tokens], each)
        for tokens, each in zip(rows, probabilities, strict=True)
    ]
