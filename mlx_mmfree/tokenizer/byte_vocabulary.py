"""The vocabulary of models that read bytes, which have no files of a tokenizer."""

from pathlib import Path

from ..files.checkpoint_files import CONFIG_FILE
from ..files.json_file import read_json_object
from .detokenizer import EACH_BYTE
from .special_tokens import Before, SpecialTokens

_FIRST_BYTES = {("reformer", 258): 2}
"""The id of byte 0, by `model_type` and `vocab_size` of published models without a tokenizer."""


class ByteVocabulary:
    """One token for each byte of UTF-8. The ids before them stand for padding and spell nothing.

    Args:
        first: The id of byte 0.
    """

    parses_special = False
    utf8_errors = EACH_BYTE
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    longest = 1

    def __init__(self, first: int) -> None:
        self._first = first
        self.vocab_size = first + 256
        self.special = SpecialTokens([])
        self.frame: tuple[list[int], list[int]] = ([], [])

    def encode_parsed(self, text: str, before: Before = "nothing") -> list[int]:
        """The ids of a text; there are no special tokens."""
        return self.encode_plain(text)

    def encode_plain(self, text: str, before: Before = "nothing") -> list[int]:
        """The ids of a text."""
        return [byte + self._first for byte in text.encode()]

    def for_threads(self) -> "ByteVocabulary":
        """The same vocabulary, since no text takes long."""
        return self

    def piece(self, token_id: int) -> str:
        """A byte as `<0x41>`, and an id before them as `<0>`."""
        if not 0 <= token_id < self.vocab_size:
            raise KeyError(token_id)
        byte = token_id - self._first
        return f"<{token_id}>" if byte < 0 else f"<0x{byte:02X}>"

    def token_id(self, piece: str) -> int | None:
        """The id of a piece; `None` if there is none."""
        return next((n for n in range(self.vocab_size) if self.piece(n) == piece), None)

    def token_bytes(self, token_id: int, at_start: bool) -> bytes:
        """The byte that a token adds to the text."""
        byte = token_id - self._first
        return b"" if byte < 0 else bytes([byte])


def byte_vocabulary(folder: Path) -> ByteVocabulary | None:
    """The vocabulary of the model in a folder, if it is one that reads bytes.

    Raises:
        CheckpointError: The configuration is damaged.
    """
    file = folder / CONFIG_FILE
    config = read_json_object(file) if file.exists() else {}
    kind, size = config.get("model_type"), config.get("vocab_size")
    if not isinstance(kind, str) or not isinstance(size, int):
        return None
    first = _FIRST_BYTES.get((kind, size))
    return None if first is None else ByteVocabulary(first)
