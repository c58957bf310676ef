"""The flags of a draft model, and the model that they name."""

import argparse
from typing import TYPE_CHECKING, Any

from .flags import positive
from .loading import dtype_of

if TYPE_CHECKING:
    from ...hub import Tokenizer
    from ...models import Decoder


def add_draft_flags(group: Any, reads: str) -> None:
    """Adds the flags for a draft model.

    Args:
        group: The parser or a group of it.
        reads: What users must know of its use, behind what it does.
    """
    group.add_argument(
        "--draft-model",
        help="folder or Hub repository of a smaller model with the same tokens; it proposes tokens "
        f"that the model then checks, {reads}",
    )
    group.add_argument(
        "--num-draft-tokens",
        type=positive,
        default=3,
        help="number of tokens that it proposes at a time (%(default)s)",
    )


def draft_of(
    args: argparse.Namespace, model: "Decoder", tokenizer: "Tokenizer"
) -> "Decoder | None":
    """The draft model that the flags name, if they name one.

    Raises:
        ValueError: It has other tokens than the model.
        MMFreeError: It cannot be loaded.
    """
    from ...generation import with_key_values
    from ...generation.speculative import check_draft, check_draft_tokenizer
    from ...hub import load

    if args.draft_model is None:
        return None
    draft, draft_tokenizer = load(args.draft_model, dtype=dtype_of(args))
    check_draft_tokenizer(tokenizer, draft_tokenizer)
    check_draft(model, draft)
    return with_key_values(draft, max_kv_size=args.max_kv_size)
