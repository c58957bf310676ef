"""Reads and uses one vocabulary by the package `tokenizers`, in terms of plain data."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

if TYPE_CHECKING:
    # the confined process imports nothing that it does not need
    from .vocabulary import Before

# only files that were made to explode give more tokens
_MAX_TOKENS_A_CHARACTER, _MAX_TOKENS = 64, 4096


@dataclass(frozen=True)
class Description:
    """The contents of a vocabulary file.

    Attributes:
        special: The tokens that text may spell. Each is its text, its id, whether it takes in spaces to
            its left and to its right, and whether it counts only between words.
        frame: The ids before and after every text.
        decoder: The decoder section; `None` if there is none.
        added: The ids of the tokens beside its model's, of the file and of others.
        new: The texts of those that the file lacks.
    """

    special: list[tuple[str, int, bool, bool, bool]]
    frame: tuple[list[int], list[int]]
    decoder: dict[str, Any] | None
    added: dict[str, int]
    new: list[str]


Added = tuple[str, bool, bool, bool, bool, bool]
"""A token that another file lists: its text, and whether it is special, takes in spaces to its left and
to its right, counts only between words, and is found after normalization."""


class TokenizerEngine:
    """The vocabulary of one `tokenizer.json`. Errors are the package's own.

    Args:
        data: The content of the file.
        listed: The tokens that other files list, in the order of the ids that new ones get. What they
            say goes before what the file says.
        roles: The special tokens that other files name. Of those that are known the flags stay.
        is_alone: Whether the process is its own. The package may then encode as for batches, which takes
            a fifth of the time; it starts threads for that, which the program of a user may not want.

    Attributes:
        description: What the file holds.
    """

    def __init__(
        self, data: bytes, listed: list[Added], roles: list[Added], is_alone: bool = False
    ) -> None:
        self._is_alone = is_alone
        self._tokenizer = Tokenizer.from_buffer(data)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        new = [
            text
            for text, *_ in (*listed, *roles)
            if text and self._tokenizer.token_to_id(text) is None
        ]
        # what the file calls special stays so
        marked = {token.content for token in self._added() if token.special}
        self._tokenizer.add_tokens([_token(*each) for each in listed])
        known = {token.content: token for token in self._added()}
        self._tokenizer.add_special_tokens(
            [known.get(text) or _token(text, *flags) for text, *flags in roles]
        )
        parts = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        # normalizer and pre-tokenizer, by what stands before a text; others are made when asked for
        self._parts: dict[Before, tuple[Any, Any]] = {"nothing": parts}
        added = self._tokenizer.get_added_tokens_decoder()
        bare, framed = self.encode("a"), self.encode("a", add_special_tokens=True)
        count = len(bare)
        starts = [n for n in range(len(framed) - count + 1) if framed[n : n + count] == bare]
        if not starts:
            raise ValueError("the post-processor changes the tokens of the text")
        self.description = Description(
            special=[
                (token.content, number, token.lstrip, token.rstrip, token.single_word)
                for number, token in added.items()
                if token.special or token.content in marked
            ],
            frame=(framed[: starts[0]], framed[starts[0] + count :]),
            decoder=_state(self._tokenizer.decoder),
            added={token.content: number for number, token in added.items()},
            new=new,
        )

    def _added(self) -> list[AddedToken]:
        return list(self._tokenizer.get_added_tokens_decoder().values())

    def ids(self) -> dict[str, int]:
        """The ids by piece."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def encode(
        self,
        text: str,
        split_special: bool = False,
        before: "Before" = "nothing",
        add_special_tokens: bool = False,
    ) -> list[int]:
        """The ids of a text.

        Args:
            text: Any text.
            split_special: Whether special tokens that it spells are split as other text is.
            before: What stands before it.
            add_special_tokens: Add the ids before and after every text.
        """
        # these belong to the tokenizer, not to a call, so they are set for every text
        self._tokenizer.encode_special_tokens = split_special
        if before not in self._parts:
            make = _after_special if before == "special" else _inside
            self._parts[before] = make(*self._parts["nothing"])
        changes = self._parts[before] != self._parts["nothing"]
        if changes:
            self._tokenizer.normalizer, self._tokenizer.pre_tokenizer = self._parts[before]
        try:
            if self._is_alone:
                (found,) = self._tokenizer.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
            else:
                found = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        finally:
            if changes:
                self._tokenizer.normalizer, self._tokenizer.pre_tokenizer = self._parts["nothing"]
        ids: list[int] = found.ids
        if len(ids) > _MAX_TOKENS + _MAX_TOKENS_A_CHARACTER * len(text):
            counts = f"{len(ids)} tokens of {len(text)} characters"
            raise ValueError(f"it makes {counts}, which is too many")
        return ids


def _token(
    text: str, special: bool, lstrip: bool, rstrip: bool, single_word: bool, normalized: bool
) -> AddedToken:
    return AddedToken(
        text,
        special=special,
        lstrip=lstrip,
        rstrip=rstrip,
        single_word=single_word,
        normalized=normalized,
    )


def _state(part: Any) -> dict[str, Any] | None:
    """A part of the tokenizer as its section of the file."""
    if part is None:
        return None
    state = json.loads(part.__getstate__())
    return state if isinstance(state, dict) else None


def _after_special(normalizer: Any, pre_tokenizer: Any) -> tuple[Any, Any]:
    """The steps for a text after a special token, which puts no space before what is not the first."""
    return normalizer, _changed(pre_tokenizer, pre_tokenizers.Sequence([]), _not_first)


def _inside(normalizer: Any, pre_tokenizer: Any) -> tuple[Any, Any]:
    """The steps for a text after other text, which put no space before it at all."""
    return (
        _changed(normalizer, normalizers.Sequence([]), _without_space),
        _changed(pre_tokenizer, pre_tokenizers.Sequence([]), _without_space),
    )


def _not_first(step: dict[str, Any]) -> dict[str, Any]:
    is_first = step.get("prepend_scheme") == "first"
    return {**step, "prepend_scheme": "never"} if is_first else step


def _without_space(step: dict[str, Any]) -> dict[str, Any]:
    if "prepend_scheme" in step:
        return {**step, "prepend_scheme": "never"}
    if step.get("type") == "Prepend":
        return {**step, "prepend": ""}
    return {**step, "add_prefix_space": False} if "add_prefix_space" in step else step


def _changed(part: Any, made: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A part of the tokenizer with other steps, in the place of one that was made for it."""

    def changed(state: Any) -> Any:
        if isinstance(state, list):
            return [changed(entry) for entry in state]
        return (
            change({k: changed(v) for k, v in state.items()}) if isinstance(state, dict) else state
        )

    before = _state(part)
    after = changed(before)
    if after == before:
        return part
    made.__setstate__(json.dumps(after).encode())
    return made


_engines: list[TokenizerEngine] = []


def handle(request: tuple[str, Any]) -> dict[str, Any]:
    """Reads a vocabulary, `("read", arguments)`, or encodes a text, `("encode", arguments)`."""
    name, arguments = request
    if name == "read":
        data, listed, roles = arguments
        _engines[:] = [TokenizerEngine(data, listed, roles, is_alone=True)]
        return {"ids": _engines[0].ids(), **asdict(_engines[0].description)}
    return {"ids": _engines[0].encode(*arguments)}
