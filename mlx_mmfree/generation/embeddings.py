"""Vectors of texts, for search and comparison."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, get_args

import mlx.core as mx
import numpy as np

from ..arguments import check_list, check_model, check_tokenizer, checks_names
from ..errors import NumericalError
from ..layers.arguments import check_array
from ..models import Decoder
from ..models.parts.embedder import embedding_use
from ..models.parts.encoders import Pooling
from ..models.parts.token_checks import check_length, check_tokens
from ..ops.device import on_cpu
from ..ops.host_blocks import all_finite
from .prompts import check_text_length

STEP_SIZE = 2048
"""Tokens that are read at a time."""
CPU_BATCH = 128
"""The most tokens of several texts at a time on a CPU, whose caches hold what is worked out for them."""


@checks_names
def embed(
    model: Decoder,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    pooling: Pooling | None = None,
    prompt_name: str | None = None,
    progress: Callable[[int], object] | None = None,
) -> mx.array:
    r"""The vector of each text, of length 1.

    .. math::
        e = m / \lVert m \rVert, \quad m = h_L, \quad h_1 \quad\text{or}\quad
        \frac{1}{L} \sum_i h_i

    with the normed residual stream :math:`h_i` at token i of L. Texts of like length are read together.

    Source: Reimers and Gurevych, arXiv 1908.10084.

    Args:
        model: Reads the texts. One that was made to write texts has the mean of its tokens by default.
        tokenizer: Belongs to the model. It puts the tokens around a text that its files ask for.
        texts: The texts.
        pooling: The vector of a text is its "first" or "last" token's, or the "mean" of all.
            Default: what the model's files say.
        prompt_name: The model's prompt that comes before each text, such as "query". Default: the one
            that the model's files name, if they name one.
        progress: Called with the number of texts that are done.

    Returns:
        float32 `(N, D)`; the product of two rows is the similarity of their texts.

    Raises:
        NumericalError: The model's numbers are not finite.
        TypeError: An argument is misspelt or of another type.
        ValueError: There is no text, or one is empty or too long; the pooling or the prompt is unknown.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> vectors = embed(model, tokenizer, ["a dog", "a cat", "the sun"])
        >>> vectors.shape, round((vectors @ vectors.T)[0, 0].item(), 4)
        ((3, 384), 1.0)
    """
    check_model("embed", model, tokenizer)
    check_tokenizer("embed", tokenizer)
    check_list("embed", "texts", texts, "texts")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(
                f"[embed] 'texts' must hold texts but number {number} is {text!r:.80}. embed_tokens "
                "takes ids."
            )
    prompt = embedding_use(model).prompt(prompt_name)
    if (empty := next((n for n, text in enumerate(texts) if not text), None)) is not None:
        raise ValueError(f"[embed] 'texts' must hold no empty text but number {empty} is one.")
    longest = longest_text(model)
    for text in texts:
        check_text_length(tokenizer, prompt + text, longest)
    ids = [tokenizer.encode(prompt + text) for text in texts]
    return _embedded(model, ids, pooling, progress)


@checks_names
def embed_tokens(
    model: Decoder,
    tokens: mx.array,
    valid: mx.array | None = None,
    *,
    pooling: Pooling | None = None,
) -> mx.array:
    """The vector of each text, of length 1, from token ids.

    Args:
        model: Reads the texts.
        tokens: Integers `(N, L)`.
        valid: Booleans or 0 and 1, `(N, L)`: which of them are no padding, on either side.
        pooling: The vector of a text is its "first" or "last" token's, or the "mean" of all.
            Default: what the model's files say.

    Returns:
        float32 `(N, D)`; the product of two rows is the similarity of their texts.

    Raises:
        NumericalError: The model's numbers are not finite.
        TypeError: An argument is misspelt or of another type.
        ValueError: The shapes do not agree, a row holds no token or too many, or the pooling is
            unknown.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> tokens, valid = mx.array([[5, 6, 7], [8, 9, 0]]), mx.array([[1, 1, 1], [1, 1, 0]])
        >>> embed_tokens(model, tokens, valid).shape
        (2, 384)
    """
    check_model("embed_tokens", model)
    check_array("embed_tokens", tokens, "tokens")
    if valid is not None:
        check_array("embed_tokens", valid, "valid")
    real = mx.ones(tokens.shape, mx.bool_) if valid is None else valid.astype(mx.bool_)
    if tokens.ndim != 2 or real.shape != tokens.shape:
        raise ValueError(
            "[embed] 'tokens' and 'valid' must have one shape (texts, length) but got "
            f"{tokens.shape} and {real.shape}."
        )
    rows = zip(np.asarray(tokens), np.asarray(real), strict=True)
    return _embedded(model, [row[mask].tolist() for row, mask in rows], pooling)


def _embedded(
    model: Decoder,
    texts: Sequence[Sequence[int]],
    pooling: Pooling | None,
    progress: Callable[[int], object] | None = None,
) -> mx.array:
    if not texts:
        raise ValueError("[embed] 'texts' must hold a text but holds none.")
    steps = embedding_steps(model, texts, pooling)
    while True:
        try:
            done = next(steps)
        except StopIteration as end:
            return mx.array(end.value)
        if progress is not None:
            progress(done)


def embedding_steps(
    model: Decoder,
    texts: Sequence[Sequence[int]],
    pooling: Pooling | None = None,
    step_size: int = STEP_SIZE,
) -> Generator[int, None, np.ndarray]:
    """The vectors of texts, float32 `(N, D)`, worked out chunk by chunk.

    Args:
        model: Reads the texts.
        texts: Their ids.
        pooling: As of `embed`.
        step_size: The most tokens that are read before it yields.

    Yields:
        The number of texts that are done.

    Raises:
        NumericalError: Weights are damaged, so that vectors would hold NaN or infinity.
        ValueError: A text has no token, too many or an unknown one, or the pooling is unknown.
    """
    use = embedding_use(model)
    chosen = use.pooling if pooling is None else pooling
    if chosen not in get_args(Pooling):
        known = ", ".join(map(repr, get_args(Pooling)))
        raise ValueError(f"[embed] 'pooling' must be one of {known} but got {chosen!r:.80}.")
    for number, text in enumerate(texts):
        if not len(text):
            raise ValueError(f"[embed] text {number} must hold a token but holds none.")
        check_length(len(text), longest_text(model))
        check_tokens(text, model.vocab_size)
    vectors = np.zeros((len(texts), model.dims))
    done = 0
    together = min(step_size, CPU_BATCH) if on_cpu() else step_size
    for batch in batches_by_length([len(text) for text in texts], together):
        length = len(texts[batch[0]])
        tokens, shares = np.zeros((len(batch), length), np.int32), np.zeros((len(batch), length))
        for row, number in enumerate(batch):
            count = len(texts[number])
            # what comes after a text is not seen by it; its own token, since rows of others may be odd
            tokens[row] = [*texts[number], *[texts[number][-1]] * (length - count)]
            shares[row, :count] = 1 / count if chosen == "mean" else 0
            if chosen != "mean":
                shares[row, 0 if chosen == "first" else count - 1] = 1
        state = model.init_state(len(batch))
        for first in range(0, length, step_size):
            chunk = slice(first, first + step_size)
            hidden, state = model.hidden(mx.array(tokens[:, chunk]), state)
            hidden = hidden.astype(mx.float32)
            is_last = first + step_size >= length
            # what no token after it reads is not computed: keys of short texts have much space
            mx.eval(hidden, [] if is_last else state)
            if not all_finite(hidden):
                raise NumericalError(
                    "[embed] the model's hidden states must be finite but hold NaN or infinity. The "
                    "weights are damaged, or too large for their dtype: try dtype=float32, or fetch the "
                    "checkpoint again."
                )
            # in float64, since the sum may be long
            vectors[batch] += (shares[:, None, chunk] @ np.asarray(hidden, np.float64))[:, 0]
            done += len(batch) if is_last else 0
            yield done
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def longest_text(model: Decoder) -> int | None:
    """The most tokens of a text that is embedded; `None`: any number."""
    bounds = (model.context_length, embedding_use(model).max_length)
    return min((bound for bound in bounds if bound is not None), default=None)


def batches_by_length(lengths: Sequence[int], step_size: int) -> list[list[int]]:
    """Indices of texts that are read together, the longest first.

    With padding they have at most `step_size` tokens, unless it is one text alone, and less than half of
    a row is padding.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batches:
            longest = lengths[batches[-1][0]]
            is_like = 2 * lengths[index] > longest
            if is_like and (len(batches[-1]) + 1) * longest <= step_size:
                batches[-1].append(index)
                continue
        batches.append([index])
    return batches
