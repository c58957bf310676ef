"""Which models can propose tokens to another one."""

from typing import Any

from ..models import Decoder


def check_draft(model: Decoder, draft_model: Decoder) -> None:
    """Refuses a draft model whose logits are not about the same tokens.

    Raises:
        ValueError: The vocabularies differ in size.
    """
    if draft_model.vocab_size != model.vocab_size:
        raise ValueError(
            f"[speculative] 'draft_model' must have the model's vocabulary of {model.vocab_size} "
            f"tokens but has {draft_model.vocab_size}. Choose a smaller model of the same family."
        )


def check_draft_tokenizer(tokenizer: Any, draft_tokenizer: Any) -> None:
    """Refuses a draft model whose tokens have other texts.

    Raises:
        ValueError: The tokenizers differ.
    """
    count = tokenizer.vocab_size
    if draft_tokenizer.vocab_size == count:
        pieces, drafted = (
            [_piece(given, n) for n in range(count)] for given in (tokenizer, draft_tokenizer)
        )
        different = next((n for n in range(count) if pieces[n] != drafted[n]), None)
        if different is None:
            return
        found = f"token {different} is {drafted[different]!r:.40}, not {pieces[different]!r:.40}"
    else:
        found = f"it has {draft_tokenizer.vocab_size} tokens, not {count}"
    raise ValueError(
        f"[speculative] 'draft_model' must come with the tokenizer of the model but {found}. Choose "
        "a smaller model of the same family."
    )


def _piece(tokenizer: Any, token: int) -> str | None:
    try:
        return str(tokenizer.piece(token))
    except ValueError:
        return None
