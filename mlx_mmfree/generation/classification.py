"""The classes of texts, by a model that sorts them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..models import SequenceClassifier
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
        check_length(len(ids), model.max_length)
        tokens = token_array(ids, model.vocab_size)
        found.append(likeliest(model(tokens)[0], model.labels, top_k))
        progress(done)
    return found


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
