"""The ids of a prompt, checked."""

from collections.abc import Sequence
from typing import Any

from ..models.parts.tokens import check_tokens

Prompt = str | Sequence[int]


def prompt_tokens(tokenizer: Any, prompt: Prompt, vocab_size: int) -> list[int]:
    """The ids of a prompt.

    Args:
        tokenizer: Encodes a text, with the special tokens that the model expects.
        prompt: A text or ids.
        vocab_size: Every id is below it.

    Raises:
        ValueError: The prompt is empty, no Unicode text, or has a token outside the vocabulary.
    """
    ids = encode_once_begun(tokenizer, prompt) if isinstance(prompt, str) and prompt else prompt
    check_not_empty(ids, "generate")
    check_tokens(ids, vocab_size)
    return [int(token) for token in ids]


def check_not_empty(prompt: Prompt, place: str) -> None:
    """Refuses a prompt without a word or token.

    Raises:
        ValueError: It is empty.
    """
    if len(prompt) == 0:
        raise ValueError(f"[{place}] 'prompt' must not be empty. Give at least one word or token.")


def encode_once_begun(tokenizer: Any, text: str, parse_special: bool | None = None) -> list[int]:
    """The ids of a text with its first token once, though a chat template may have spelled it."""
    ids: list[int] = tokenizer.encode(text, parse_special=parse_special)
    is_twice = len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id
    return ids[1:] if is_twice else ids
