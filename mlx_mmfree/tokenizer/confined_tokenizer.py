"""Reads and uses a vocabulary file of an unknown shape in a process with limits."""

from ..platform.confinement import ConfinedProcess
from .special_tokens import Before
from .tokenizer_engine import Description

MEMORY_BYTES = 2**30
READ_CPU_SECONDS = 10.0
_ENCODE_CPU_SECONDS, _CHARACTERS_A_SECOND = 2.0, 50_000


class ConfinedTokenizer:
    """Does what a `TokenizerEngine` does, in a confined process.

    All methods raise a `LimitError` if the process fails, takes too long or takes too much memory.

    Args:
        data: The content of the file.
        special: The tokens that other files call special.
    """

    def __init__(self, data: bytes, special: list[tuple[str, bool, bool, bool]]) -> None:
        self._arguments = (data, special)
        self._process = ConfinedProcess(
            "mlx_mmfree.tokenizer.tokenizer_server", ("tokenizers",), MEMORY_BYTES
        )

    def read(self) -> tuple[Description, dict[str, int]]:
        """Reads the file, and gives its description and the ids by piece."""
        answer = self._process.ask(("read", self._arguments), READ_CPU_SECONDS)
        found = Description(
            special=[(*token,) for token in answer["special"]],
            frame=(answer["frame"][0], answer["frame"][1]),
            decoder=answer["decoder"],
        )
        return found, answer["ids"]

    def encode(self, text: str, split_special: bool, before: Before) -> list[int]:
        """The ids of a text. The file is read again if the last text ended the process."""
        if self._process.process_id is None:
            self.read()
        seconds = _ENCODE_CPU_SECONDS + len(text) / _CHARACTERS_A_SECOND
        ids: list[int] = self._process.ask(("encode", (text, split_special, before)), seconds)[
            "ids"
        ]
        return ids
