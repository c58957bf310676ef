"""A second model beside the one that is trained: a teacher, or the reference of preferences."""

from ..errors import TrainingError
from ..hub import Tokenizer
from ..hub.checkpoint.load import OpenedModel
from ..models import Decoder


def load_companion(opened: OpenedModel, tokenizer: Tokenizer) -> Decoder:
    """Loads a model whose predictions are compared with those of a model with the given tokenizer.

    Raises:
        TrainingError: It has another vocabulary.
        CheckpointError: It cannot be loaded.
    """
    _check_same_tokens(tokenizer, opened.tokenizer(), str(opened.checkpoint.folder))
    return opened.load()


def _check_same_tokens(tokenizer: Tokenizer, other: Tokenizer, name: str) -> None:
    rule = f"[training] '{name}' must have the tokens of the model that is trained"
    way_out = "Choose one with the same vocabulary."
    count = tokenizer.vocab_size
    if other.vocab_size != count:
        raise TrainingError(f"{rule}, {count}, but has {other.vocab_size}. {way_out}")
    for token_id in range(count):
        wanted, got = tokenizer.piece(token_id), other.piece(token_id)
        if wanted != got:
            raise TrainingError(
                f"{rule} but its token {token_id} is {got!r:.80} instead of {wanted!r:.80}. {way_out}"
            )
