"""A conversation that its chat template has written out, and its token ids."""

from typing import Protocol

from ..special_tokens import Before, Shield, SpecialTokens
from ..vocabulary import encode_split


class ChatVocabulary(Protocol):
    """What this module asks of a vocabulary."""

    special: SpecialTokens

    def encode_parsed(self, text: str) -> list[int]: ...

    def encode_plain(self, text: str, before: Before = "nothing") -> list[int]: ...


class RenderedChat:
    """The text of a conversation, which knows the special tokens of the template from those in messages.

    Args:
        covered: The text of the template, in which a shield covers the special tokens in messages.
        shield: The shield.
        vocabulary: The vocabulary, which makes the ids.
        bos_token_id: The token that every conversation begins with; `None`: as the template has it.

    Attributes:
        text: The conversation as a reader sees it.
    """

    def __init__(
        self, covered: str, shield: Shield, vocabulary: ChatVocabulary, bos_token_id: int | None
    ) -> None:
        self.text = shield.restore(covered)
        self._covered = covered
        self._shield = shield
        self._vocabulary = vocabulary
        self._bos_token_id = bos_token_id

    def ids(self) -> list[int]:
        """The ids of the conversation. A first token that it needs and the template lacks is added."""
        ids = self._ids()
        if self._bos_token_id is None or ids[:1] == [self._bos_token_id]:
            return ids
        return [self._bos_token_id, *ids]

    def ids_after(self, size: int) -> list[int]:
        """The ids of what follows the first `size` characters of the text."""
        parts = list(self._vocabulary.special.split(self._covered[:size]))
        before: Before = "text"
        if not parts or isinstance(parts[-1], int):
            before = "special" if parts else "nothing"
        return self._ids_of_parts(self._covered[size:], before)

    def _ids(self) -> list[int]:
        special = self._vocabulary.special
        parts = list(special.split(self._covered))
        if parts == list(special.split(self.text)):
            ids = self._vocabulary.encode_parsed(self.text)
            spelled = [part for part in parts if isinstance(part, int)]
            if [number for number in ids if number in special.id_set] == spelled:
                return ids
        return self._ids_of_parts(self._covered)

    def _ids_of_parts(self, covered: str, before: Before = "nothing") -> list[int]:
        parts = (
            part if isinstance(part, int) else self._shield.restore(part)
            for part in self._vocabulary.special.split(covered)
        )
        return encode_split(self._vocabulary.encode_plain, parts, before)
