"""Texts in another language, by an encoder-decoder."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ...models import EncoderDecoder
from ...models.parts.tokens import check_length, check_tokens
from ...tokenizer.pair_tokenizer import PairTokenizer, SharedVocabulary
from ...tokenizer.tokenizer import Tokenizer
from .beam_search import beam_search
from .search_settings import BeamSettings, settings_of


def translate(
    model: EncoderDecoder,
    tokenizer: PairTokenizer | Tokenizer,
    texts: Sequence[str],
    *,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    max_tokens: int | None = None,
    batch_size: int = 16,
    progress: Callable[[int], object] = lambda _: None,
) -> list[str]:
    """Translates texts, those of similar length together.

    Args:
        model: A model whose configuration names the last token.
        tokenizer: Belongs to the model, as `load` gives it.
        texts: The texts; sentences, for most models.
        num_beams: Texts that are written side by side; 1 is greedy. Default: as the model's publishers
            search.
        length_penalty: See `BeamSettings`. Default: the publishers'.
        max_tokens: Number of tokens of the longest result. Default: the publishers', or as many as the
            model was made for.
        batch_size: Number of texts translated together.
        progress: Called with the number of texts that are done.

    Returns:
        The translation of each text.

    Raises:
        CheckpointError: A value of the model's files is wrong, or the tokenizer names no end of a text.
        UnsupportedModelError: The files ask for a search that is not implemented.
        ValueError: A number is not positive, or a token is outside the vocabulary.

    Example:
        >>> model, tokenizer = load("Helsinki-NLP/opus-mt-en-de")  # doctest: +SKIP
        >>> translate(model, tokenizer, ["I am a small frog."])  # doctest: +SKIP
        ['Ich bin ein kleiner Frosch.']
    """
    if batch_size < 1:
        raise ValueError(f"[translate] 'batch_size' must be positive but got {batch_size}.")
    if isinstance(tokenizer, Tokenizer):
        tokenizer = SharedVocabulary(tokenizer)
    settings = settings_of(
        model, num_beams=num_beams, length_penalty=length_penalty, max_tokens=max_tokens
    )
    sources = [tokenizer.encode(text) for text in texts]
    order = sorted(range(len(sources)), key=lambda n: len(sources[n]))
    results = [""] * len(sources)
    for first in range(0, len(order), batch_size):
        group = order[first : first + batch_size]
        found = translate_tokens(
            model,
            [sources[n] for n in group],
            settings,
            lambda done, first=first: progress(first + done),  # type: ignore[misc]
        )
        for n, tokens in zip(group, found, strict=True):
            results[n] = tokenizer.decode(tokens)
    return results


def translate_tokens(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    settings: BeamSettings,
    report: Callable[[int], object] = lambda _: None,
) -> list[list[int]]:
    """The tokens of the target of each source; all are read together.

    Args:
        model: Reads the sources and writes the targets.
        sources: Their tokens, with the last.
        settings: How the search goes.
        report: Called with the number of sources that are done, after each step.

    Raises:
        ValueError: There is no source, one is empty or too long, the targets may become so, or a token
            is outside the vocabulary.
    """
    if not sources or not all(len(source) for source in sources):
        raise ValueError("[translate] every source must hold a token, but one holds none.")
    for source in sources:
        check_tokens(source, model.vocab_size)
        check_length(len(source), model.max_length)
    check_length(settings.max_tokens, model.max_length)
    lengths = np.array([len(source) for source in sources])
    tokens = np.zeros((len(sources), int(lengths.max())), np.int32)
    for row, source in zip(tokens, sources, strict=True):
        row[: len(source)] = source
    valid = mx.array(np.arange(tokens.shape[1]) < lengths[:, None])
    memory = model.encode(mx.array(tokens), valid)
    # a row for each beam
    memory, valid = (mx.repeat(array, settings.num_beams, axis=0) for array in (memory, valid))

    def step(last: mx.array, state: Any) -> tuple[mx.array, Any]:
        logits, state = model.decode(last, memory, state, memory_valid=valid)
        return logits[:, -1], state

    return beam_search(step, len(sources), settings, report)
