"""Words for the places that a text leaves open, by a masked language model."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..models import MaskedLM
from ..models.parts.tokens import check_length, check_tokens
from ..ops import log_softmax


@dataclass(frozen=True)
class Filling:
    """What may stand in one open place.

    Attributes:
        tokens: The likeliest tokens, best first.
        words: Their texts.
        probabilities: Their probabilities.
    """

    tokens: list[int]
    words: list[str]
    probabilities: list[float]


def fill(model: MaskedLM, tokenizer: Any, text: str, *, top_k: int = 5) -> list[Filling]:
    """The likeliest tokens for each mask of a text, each place by itself.

    Args:
        model: Gives the logits.
        tokenizer: Belongs to the model.
        text: Spells the mask token of the tokenizer where a word is missing.
        top_k: Number of tokens for each place.

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
    ids = tokenizer.encode(text, parse_special=True)
    places = [n for n, token in enumerate(ids) if token == mask]
    if not places:
        raise ValueError(
            f"[fill] 'text' must hold {tokenizer.piece(mask)!r} where a word is missing but holds none."
        )
    check_length(len(ids), model.context_length)
    check_tokens(ids, model.vocab_size)
    logits = model(mx.array([ids]))[0, mx.array(places)].astype(mx.float32)
    scores = log_softmax(logits)
    order = mx.argsort(-scores, axis=-1)[:, : min(top_k, scores.shape[-1])]
    chances = mx.exp(mx.take_along_axis(scores, order, axis=-1))
    rows: list[list[int]] = order.tolist()  # type: ignore[assignment]
    probabilities: list[list[float]] = chances.tolist()  # type: ignore[assignment]
    return [
        Filling(tokens, [tokenizer.decode([token]).strip() for token in tokens], each)
        for tokens, each in zip(rows, probabilities, strict=True)
    ]
