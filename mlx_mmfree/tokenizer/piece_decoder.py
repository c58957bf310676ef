"""Applies the decoder section of a `tokenizer.json` to one token at a time.

The package `tokenizers` decodes whole texts only, and its work for each new token would grow with the
text.
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import UnsupportedModelError
from .detokenizer import EACH_BYTE

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_GROWTH, _MAX_STEPS = 16, 16
_STEPS = ("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Sequence", "Strip")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for bytes: most bytes stand for themselves, the others follow 255."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    rest = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


BYTE_CHARACTERS = _byte_alphabet()


class PieceDecoder:
    """Gives the bytes that a token adds to a text.

    Runs of byte tokens are decoded character by character. A byte that fits nowhere becomes U+FFFD and
    leaves its neighbours alone.

    Args:
        state: The decoder section; `None` if the file has none.
        file: The file it was read from, for messages.

    Raises:
        UnsupportedModelError: The section needs several tokens at once, or makes tokens much longer.
    """

    def __init__(self, state: Mapping[str, Any] | None, file: Path) -> None:
        self._joins_with_spaces = state is None
        self._steps: list[Callable[[str, bool], str | bytes]] = []
        self._strip = ""
        self.utf8_errors = "replace"
        fused = False
        growth = 1
        for step in _flatten(state):
            kind = step.get("type")
            if kind == "ByteLevel":
                self._steps.append(_from_byte_level)
            elif kind == "ByteFallback":
                self._steps.append(_from_byte_piece)
                self.utf8_errors = EACH_BYTE
            elif kind == "Metaspace":
                self._steps.append(_metaspace(step))
            elif kind == "Replace" and "String" in step["pattern"]:
                pattern, content = step["pattern"]["String"], step["content"]
                growth *= _growth(pattern, content)
                self._steps.append(_replace(pattern, content))
            elif kind == "Strip" and fused and not step["stop"] and step["start"] <= 1:
                self._strip = step["content"] if step["start"] else ""
            elif kind == "Fuse":
                fused = True
            else:
                raise UnsupportedModelError(
                    f"[tokenizer] '{file}': the decoder must be made of {', '.join(_STEPS)}, each of "
                    f"which can decode one token alone, but has {kind!r:.40} with settings that cannot. "
                    "Use a byte-level or SentencePiece vocabulary."
                )

        if growth > _MAX_GROWTH or len(self._steps) > _MAX_STEPS:
            raise UnsupportedModelError(
                f"[tokenizer] '{file}': the decoder must have at most {_MAX_STEPS} steps and make a "
                f"token at most {_MAX_GROWTH} times as long as it is spelled, but has "
                f"{len(self._steps)} steps and may make it {growth} times as long. Download it again."
            )

    def __call__(self, piece: str, at_start: bool) -> bytes:
        value: str | bytes = piece
        for step in self._steps:
            if isinstance(value, bytes):
                break
            value = step(value, at_start)
        raw = value.encode() if isinstance(value, str) else value
        if at_start:
            return raw.removeprefix(self._strip.encode()) if self._strip else raw
        return b" " + raw if self._joins_with_spaces else raw


def _flatten(state: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if state is None:
        return []
    if state.get("type") != "Sequence":
        return [state]
    return [step for part in state["decoders"] for step in _flatten(part)]


def _from_byte_level(piece: str, at_start: bool) -> bytes:
    if all(character in BYTE_CHARACTERS for character in piece):
        return bytes(BYTE_CHARACTERS[character] for character in piece)
    return piece.encode()


def _from_byte_piece(piece: str, at_start: bool) -> str | bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes.fromhex(match.group(1)) if match else piece


def _replace(pattern: str, content: str) -> Callable[[str, bool], str]:
    return lambda piece, at_start: piece.replace(pattern, content)


def _growth(pattern: str, content: str) -> int:
    """How many times as long a replacement can make a text."""
    if not pattern:
        return 1 + 2 * len(content)
    return max(1, math.ceil(len(content) / len(pattern)))


def _metaspace(step: Mapping[str, Any]) -> Callable[[str, bool], str]:
    mark, keeps_first = step["replacement"], step.get("prepend_scheme") == "never"
    return lambda piece, at_start: piece.replace(mark, "" if at_start and not keeps_first else " ")
