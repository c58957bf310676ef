"""The ids of a prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..models.parts.token_checks import check_length, check_tokens

Prompt = str | Sequence[int]


def check_text_length(tokenizer: Any, text: str, most: int | None) -> None:
    """Refuses a text that has too many tokens whatever they are, before it is encoded.

    Args:
        tokenizer: Knows how much of a text one token may stand for.
        text: The text.
        most: The most tokens; `None` for any number.

    Raises:
        ValueError: There are more.
    """
    if most is not None and len(text) > most:
        check_length(tokenizer.least_tokens(text), most, "at least ")


def prompt_tokens(
    tokenizer: Any,
    prompt: Prompt,
    vocab_size: int,
    parse_special: bool | None = None,
    most: int | None = None,
) -> list[int]:
    """The ids of a prompt. The first token of a text comes once, though a chat template may spell it.

    Args:
        tokenizer: Encodes a text, with the special tokens that the model expects.
        prompt: A text or ids.
        vocab_size: Every id is below it.
        parse_special: As for `Tokenizer.encode`.
        most: The most tokens that the model reads, where it ends; longer texts are not encoded.

    Raises:
        TypeError: The prompt is neither a text nor a list.
        ValueError: The prompt is empty, too long, no Unicode text, or has a token outside the
            vocabulary.
    """
    given: Any = prompt
    ids: Any = given.tolist() if isinstance(given, mx.array) else given
    is_one = hasattr(prompt, "__len__") and getattr(prompt, "ndim", 1) == 1
    if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], (str, list, tuple)):
        is_one = False
    # a module is a mapping too, and bytes are numbers
    if isinstance(prompt, (Mapping, bytes)):
        is_one = False
    if not is_one:
        got = type(prompt).__name__ if callable(prompt) else f"{prompt!r:.80}"
        if hasattr(prompt, "shape"):
            got = f"an array of shape {prompt.shape}"
        raise TypeError(
            f"[generate] 'prompt' must be a text or a list of ids but got {got}. Several prompts are "
            "for batch_generate."
        )
    if isinstance(prompt, str) and prompt:
        check_text_length(tokenizer, prompt, most)
        ids = tokenizer.encode(prompt, parse_special=parse_special)
        if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            ids = ids[1:]
    if len(ids) == 0:
        raise ValueError("[generate] 'prompt' must not be empty. Give at least one word or token.")
    # the tokenizer's own are whole numbers, of which the largest tells
    if not isinstance(prompt, str) or max(ids) >= vocab_size:
        check_tokens(ids, vocab_size)
    # an object for each token of a long text would take four times the memory
    same: dict[int, int] = {}
    return [same.setdefault(token, token) for token in map(int, ids)]
