"""Special tokens of a vocabulary: finds them in text, and keeps them out of chat messages."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Before = Literal["nothing", "special", "text"]
"""What stands before a text: nothing, a special token, or other text."""

ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""Tokens that end a turn of a chat. Many files do not list them as ends of generation."""

_LONGEST_PART = 1000
_PRIVATE_USE = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
_PRIVATE_USE_RANGES = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


@dataclass(frozen=True)
class SpecialToken:
    """A token that text may spell.

    Attributes:
        content: Its text.
        id: Its id.
        special: Whether its file calls it special.
        lstrip: Whether it takes in the spaces before it.
        rstrip: Whether it takes in the spaces after it.
        single_word: Whether it counts only where no letter or digit touches it.
    """

    content: str
    id: int
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class SpecialTokens:
    """The special tokens of one vocabulary.

    Args:
        tokens: The tokens. Those with an empty text are ignored.
        longest_first: Whether the longest token of a text is found first, as in llama.cpp, and not the
            leftmost.
    """

    def __init__(self, tokens: Iterable[SpecialToken], *, longest_first: bool = False) -> None:
        self._longest_first = longest_first
        self._tokens = {token.content: token for token in tokens if token.content}
        self.ids = {content: token.id for content, token in self._tokens.items()}
        self.id_set = frozenset(self.ids.values())
        sizes: dict[str, set[int]] = {}
        for content in self._tokens:
            sizes.setdefault(content[0], set()).add(len(content))
        self._sizes = {first: sorted(lengths, reverse=True) for first, lengths in sizes.items()}
        starts = "".join(map(re.escape, self._sizes))
        self._starts = re.compile(f"[{starts}]" if starts else r"(?!)")
        self._forward = sorted(self._tokens)
        self._backward = sorted(content[::-1] for content in self._tokens)
        self._longest = min(max(map(len, self._tokens), default=0), _LONGEST_PART)

    def split(self, text: str) -> Iterator[str | int]:
        """Splits a text into stretches of plain text and ids of the special tokens that it spells."""
        done = 0
        for start, stop in self._matches(text):
            token = self._tokens[text[start:stop]]
            if token.single_word and _inside_word(text, start, stop):
                continue
            while token.lstrip and start > done and text[start - 1].isspace():
                start -= 1
            while token.rstrip and stop < len(text) and text[stop].isspace():
                stop += 1
            if start > done:
                yield text[done:start]
            yield token.id
            done = stop
        if done < len(text):
            yield text[done:]

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields where a text spells a whole special token, or a part of one at either end.

        A part counts because a chat template may put the rest of the token next to it. Parts of letters
        and digits alone do not count, since templates build tokens from the names of roles.
        """
        sizes = range(min(self._longest, len(text)), 0, -1)
        yield from ((0, n) for n in sizes if _begins(self._backward, text[:n][::-1]))
        yield from self._matches(text)
        end = len(text)
        yield from ((end - n, end) for n in sizes if _begins(self._forward, text[end - n :]))

    def _matches(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields where the text spells whole tokens, from left to right, the longest at each place."""
        if self._longest_first:
            yield from self._longest_matches(text)
            return
        done = 0
        for match in self._starts.finditer(text):
            start = match.start()
            if start < done:
                continue
            for size in self._sizes[match.group()]:
                if text[start : start + size] in self._tokens:
                    done = start + size
                    yield start, done
                    break

    def _longest_matches(self, text: str) -> list[tuple[int, int]]:
        """Where the text spells whole tokens, of which a longer one goes before those that it meets."""
        spelled = [
            (start, start + size)
            for start, first in (
                (match.start(), match.group()) for match in self._starts.finditer(text)
            )
            for size in self._sizes[first]
            if text[start : start + size] in self._tokens
        ]
        spelled.sort(key=lambda place: (-len(text[slice(*place)].encode()), place))
        taken = bytearray(len(text))
        found = []
        for start, stop in spelled:
            if not any(taken[start:stop]):
                taken[start:stop] = b"\1" * (stop - start)
                found.append((start, stop))
        return sorted(found)


class Shield:
    """Hides the special tokens that chat messages spell while a template is rendered.

    Each of their characters is replaced by a private-use character that occurs nowhere in the messages.
    So lengths stay the same, and what special tokens the rendered text spells are the template's own.

    Args:
        special: The tokens to hide.
        texts: Every text that will be rendered, to find characters that none of them holds.
    """

    def __init__(self, special: SpecialTokens, texts: Iterable[str]) -> None:
        self._special = special
        taken = {character for text in texts for character in _PRIVATE_USE.findall(text)}
        self._free = (chr(c) for c in _chain(_PRIVATE_USE_RANGES) if chr(c) not in taken)
        self._cover: dict[str, str] = {}
        self._covered: dict[str, str] = {}

    def cover(self, text: str) -> str:
        """The text with the special tokens that it spells hidden."""
        # the names in the schemas of tools come again and again
        if text not in self._covered:
            self._covered[text] = self._newly_covered(text)
        return self._covered[text]

    def _newly_covered(self, text: str) -> str:
        characters: list[str] | None = None
        for start, stop in self._special.spans(text):
            characters = characters or list(text)
            characters[start:stop] = map(self._hide, text[start:stop])
        return text if characters is None else "".join(characters)

    def restore(self, text: str) -> str:
        """The text with what was hidden put back."""
        # one after another, since what is put back is never hidden; other threads run between them
        for shown, hidden in self._cover.items():
            text = text.replace(hidden, shown)
        return text

    def _hide(self, character: str) -> str:
        if character not in self._cover:
            self._cover[character] = next(self._free)
        return self._cover[character]


def _chain(ranges: Iterable[range]) -> Iterator[int]:
    for numbers in ranges:
        yield from numbers


def _begins(texts: list[str], part: str) -> bool:
    """Whether a part begins one of the sorted texts, and is more than letters and digits."""
    place = bisect_left(texts, part)
    return place < len(texts) and texts[place].startswith(part) and not part.isalnum()


def _inside_word(text: str, start: int, stop: int) -> bool:
    """Whether a letter or digit touches the stretch."""
    neighbours = text[max(start - 1, 0) : start] + text[stop : stop + 1]
    return re.search(r"\w", neighbours) is not None
