"""The files of a tokenizer: settings, special tokens, a vocabulary, and tokens as text."""

import codecs
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import merge
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

from ..errors import CheckpointError, MMFreeError
from ..files.checkpoint_files import CONFIG_FILE, GENERATION_FILE, TEMPLATE_FILE, TEMPLATES_FOLDER
from ..files.reading import decode_text, read_file, read_json_object, tokenizer_files

Before = Literal["nothing", "special", "text"]
"""The prefix of a text: nothing, a special token, or other text."""

ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""Tokens that end a turn of a chat. Many files do not list them as ends of generation."""

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How pieces of SentencePiece spell a space."""
_SPACES = (*filter(str.isspace, map(chr, range(0x3001))), SPACE)
"""A vocabulary may drop any number of them."""

_LONGEST_PART = 1000
STRETCH = 65_536
"""The characters of a long text that are looked at in one step."""
# a text with characters of the first range takes half of the memory
_PRIVATE_USE = re.compile("[\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
_PRIVATE_USE_RANGES = (
    range(0xE000, 0xF900),
    range(0xF0000, 0xFFFFE),
    range(0x100000, 0x10FFFE),
)


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
        normalized: Whether it is found in a text after normalization, rather than before.
    """

    content: str
    id: int
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


def single_matches(character: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Yields the matches of a pattern for one character. Other threads run between its searches."""
    for start in range(0, len(text), STRETCH):
        yield from character.finditer(text, start, start + STRETCH)


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

        They come by where they start.

        A part counts because a chat template may put the rest of the token next to it. Parts of letters
        and digits alone do not count, since templates build tokens from the names of roles.
        """
        sizes = range(min(self._longest, len(text)), 0, -1)
        end = len(text)
        first = ((0, n) for n in sizes if _begins(self._backward, text[:n][::-1]))
        last = ((end - n, end) for n in sizes if _begins(self._forward, text[end - n :]))
        # a list of all takes a hundred times the memory of the text
        yield from merge(first, self._matches(text), last, key=itemgetter(0))

    def _matches(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields the spans of whole tokens in a text, left to right, the longest at each position."""
        if self._longest_first:
            yield from self._longest_matches(text)
            return
        done = 0
        for match in single_matches(self._starts, text):
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
                (match.start(), match.group()) for match in single_matches(self._starts, text)
            )
            for size in self._sizes[first]
            if text[start : start + size] in self._tokens
        ]
        spelled.sort(key=lambda span: (-len(text[slice(*span)].encode()), span))
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
        taken = {match.group() for text in texts for match in single_matches(_PRIVATE_USE, text)}
        self._free = (chr(c) for c in _chain(_PRIVATE_USE_RANGES) if chr(c) not in taken)
        self._cover: dict[str, str] = {}
        self._covered: dict[str, str] = {}
        self._spelled: dict[str, str] = {}

    def cover(self, text: str) -> str:
        """The text with the special tokens that it spells hidden."""
        # the names in the schemas of tools come again and again
        if text not in self._covered:
            self._covered[text] = self._newly_covered(text)
        return self._covered[text]

    def _newly_covered(self, text: str) -> str:
        parts: list[str] = []
        done = 0
        # parts at the ends may overlap whole tokens
        for start, stop in self._special.spans(text):
            if stop > done:
                # a text of nothing but special tokens has no others between them
                parts += [text[done:start]] if start > done else []
                parts.append(self._hidden(text[max(start, done) : stop]))
                done = stop
        return "".join([*parts, text[done:]]) if parts else text

    def restore(self, text: str) -> str:
        """The text with what was hidden put back."""
        # these may be as large as the text, and the template has read them
        self._covered.clear()
        if not self._cover:
            return text
        # stretch by stretch, which takes less memory; other threads run between them
        starts = range(0, len(text), STRETCH)
        return "".join([self._restored(text[start : start + STRETCH]) for start in starts])

    def _restored(self, text: str) -> str:
        # one after another, since what is put back is never hidden
        for shown, hidden in self._cover.items():
            text = text.replace(hidden, shown)
        return text

    def _hidden(self, spelled: str) -> str:
        if spelled not in self._spelled:
            for character in spelled:
                if character not in self._cover:
                    self._cover[character] = next(self._free)
            self._spelled[spelled] = "".join(map(self._cover.__getitem__, spelled))
        return self._spelled[spelled]


def _chain(ranges: Iterable[range]) -> Iterator[int]:
    for numbers in ranges:
        yield from numbers


def _begins(texts: list[str], part: str) -> bool:
    """Returns whether a part begins one of the sorted texts, and is more than letters and digits."""
    index = bisect_left(texts, part)
    return index < len(texts) and texts[index].startswith(part) and not part.isalnum()


def _inside_word(text: str, start: int, stop: int) -> bool:
    """Returns whether a letter or digit touches the stretch."""
    neighbours = text[max(start - 1, 0) : start] + text[stop : stop + 1]
    return re.search(r"\w", neighbours) is not None


CHANGE_THE_TEXT = "Encode another text, or use another tokenizer."
"""The hint where a sound file cannot encode a text."""


@contextmanager
def clean_errors(problem: str, hint: str = "Download it again.") -> Iterator[None]:
    """Turns whatever the block raises into a `CheckpointError`, as `raise_clean` does."""
    try:
        yield
    except BaseException as error:
        raise_clean(error, problem, hint)


def raise_clean(error: BaseException, problem: str, hint: str = "Download it again.") -> NoReturn:
    """Raises what a caught error becomes: a `CheckpointError`, or itself if it says enough.

    A Rust panic is no `Exception` in Python, so it is recognised by its name.

    Args:
        error: What was caught.
        problem: What the new error says first, without a full stop.
        hint: What it says last.
    """
    is_panic = type(error).__name__ == "PanicException"
    if isinstance(error, MMFreeError) or not (is_panic or isinstance(error, Exception)):
        raise error
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    raise CheckpointError(f"[tokenizer] {problem} ({reason}). {hint}") from error


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\N{REPLACEMENT CHARACTER}" * (error.end - error.start), error.end


EACH_BYTE = "mlx_mmfree.each_byte"
codecs.register_error(EACH_BYTE, _replace_each_byte)


MAX_VOCABULARY_BYTES = 64_000_000
MAX_TEMPLATE_BYTES = 128_000
MAX_TOKEN_ID = 2**31 - 1
GGUF_MARK = {"mlx_mmfree": {"source": "gguf"}}
"""The key of `tokenizer_config.json` that says that the files were made of a GGUF file."""

_MOST_TEMPLATES = 64
# of BitNet b1.58 2B4T: its publishers' program puts the first token before what the template writes
_BEGUN_MODELS = ("bitnet",)
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True)
class TokenizerSettings:
    """The settings of one folder.

    Attributes:
        folder: The folder they were read from.
        named: The texts of the tokens with a role, such as `bos_token`.
        add_bos: Whether the ids of a text begin with the first token; `None` if no file says so.
        add_eos: Whether they end with the last token; `None` if no file says so.
        tokens: The tokens that the files list in addition to the vocabulary, by their ids.
        roles: The special tokens that they name, without ids. One that the vocabulary lacks is added.
        add_prefix_space: Whether a space is put before a text; `None` if no file says so.
        is_legacy: Whether a space is put before a text after a special token too.
        is_gguf: Whether the files were made of a GGUF file, so that llama.cpp's rules hold.
        begins_chats: Whether a conversation begins with the first token of texts though its template
            does not write it.
        chat_templates: The templates by name.
        bos_token_id: The first token, of the generation settings or the model's configuration.
        eos_token_ids: The last tokens, of the generation settings and the model's configuration.
    """

    folder: Path
    named: dict[str, str]
    add_bos: bool | None
    add_eos: bool | None
    tokens: tuple[SpecialToken, ...]
    roles: tuple[SpecialToken, ...]
    add_prefix_space: bool | None
    is_legacy: bool
    is_gguf: bool
    begins_chats: bool
    chat_templates: dict[str, str]
    bos_token_id: int | None
    eos_token_ids: frozenset[int]

    @property
    def special(self) -> tuple[SpecialToken, ...]:
        """All tokens that some file calls special."""
        return (*(token for token in self.tokens if token.special), *self.roles)


def read_settings(folder: Path) -> TokenizerSettings:
    """Reads every settings file that the folder holds; all of them are optional.

    Raises:
        CheckpointError: A file is damaged or an entry has the wrong type.
    """
    files = config_file, named_file, model_file, generation_file = [
        folder / name
        for name in (
            "tokenizer_config.json",
            "special_tokens_map.json",
            CONFIG_FILE,
            GENERATION_FILE,
        )
    ]
    config, extra, model, generation = (read_json_object(f, is_optional=True) for f in files)
    if isinstance(model.get("text_config"), dict):
        # of a model of texts and pictures
        model = {**model["text_config"], **model}
    roles, others = _roles(config, config_file), _others(config, config_file)
    older = _roles(extra, named_file)
    named = older | roles
    if "added_tokens_decoder" not in config:
        # as in transformers, the older file counts where this table is missing
        order = dict.fromkeys((*_NAMED, *roles, *older))
        named = roles | older
        roles = {key: named[key] for key in order if key in named}
        others = others or _others(extra, named_file)
    special = (*roles.values(), *others)
    tokens = _listed_tokens(config, config_file, folder / "added_tokens.json", special)
    bos = _ids(generation, "bos_token_id", generation_file) or _ids(
        model, "bos_token_id", model_file
    )
    is_gguf = all(config.get(key) == value for key, value in GGUF_MARK.items())
    return TokenizerSettings(
        folder=folder,
        named={key: named[key].content for key in _NAMED if key in named},
        add_bos=_flag(config, "add_bos_token", config_file),
        add_eos=_flag(config, "add_eos_token", config_file),
        tokens=tokens,
        roles=special,
        add_prefix_space=_flag(config, "add_prefix_space", config_file),
        is_legacy=bool(_flag(config, "legacy", config_file)),
        is_gguf=is_gguf,
        begins_chats=is_gguf or model.get("model_type") in _BEGUN_MODELS,
        chat_templates=_chat_templates(config, config_file),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=frozenset(
            _ids(generation, "eos_token_id", generation_file)
            + _ids(model, "eos_token_id", model_file)
        ),
    )


def read_limited(file: Path, limit_bytes: int) -> bytes:
    """The bytes of a file of a checkpoint.

    Raises:
        CheckpointError: The file cannot be read, is a link out of its folder, or has more than
            `limit_bytes`.
    """
    try:
        return read_file(file, limit_bytes, is_member=True)
    except OSError as error:
        raise CheckpointError(
            f"[tokenizer] '{file}' cannot be read: {error}. Download the checkpoint again."
        ) from error


def _wrong(file: Path, key: str, rule: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"[tokenizer] '{file}': '{key}' must {rule} but got {value!r:.60}. "
        "Correct the entry, or download the file again."
    )


def _flag(config: Mapping[str, Any], key: str, file: Path, prefix: str = "") -> bool | None:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise _wrong(file, prefix + key, "be true or false", value)
    return value


def _text(value: Any, key: str, file: Path) -> str:
    text = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        raise _wrong(file, key, "be a text or an object with a text 'content'", value)
    return text


def _ids(config: Mapping[str, Any], key: str, file: Path) -> list[int]:
    value = config.get(key)
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(type(each) is int and 0 <= each <= MAX_TOKEN_ID for each in ids):
        raise _wrong(file, key, "be a token id or a list of token ids", value)
    return ids


def _roles(settings: Mapping[str, Any], file: Path) -> dict[str, SpecialToken]:
    """The special tokens of one file by their roles, in the order in which transformers adds them."""
    # roles of one model too, such as `image_token`
    own = {k: v for k, v in settings.items() if k.endswith("_token") and isinstance(v, str)}
    for key in _LISTS:
        own |= settings[key] if isinstance(settings.get(key), dict) else {}
    named = {key: settings[key] for key in _NAMED if settings.get(key) is not None}
    return {key: _special(value, key, file) for key, value in (named | own | named).items()}


def _others(settings: Mapping[str, Any], file: Path) -> list[SpecialToken]:
    """The special tokens of one file without a role: of its two lists, the newer one counts."""
    found: list[SpecialToken] = []
    for key in _LISTS:
        value = settings.get(key) or []
        if not isinstance(value, list | dict):
            raise _wrong(file, key, "be a list or an object", value)
        if isinstance(value, list):
            found = found or [_special(entry, key, file) for entry in value]
    return found


def _special(value: Any, key: str, file: Path) -> SpecialToken:
    """A special token whose id is not known."""
    return replace(_flagged(value, -1, key, file), special=True)


def _flagged(value: Any, number: int, key: str, file: Path) -> SpecialToken:
    """A token that a file gives as a text, or as an object with the text and flags."""
    flags = value if isinstance(value, Mapping) else {}
    special, lstrip, rstrip, single_word = (
        bool(_flag(flags, name, file, f"{key}."))
        for name in ("special", "lstrip", "rstrip", "single_word")
    )
    normalized = _flag(flags, "normalized", file, f"{key}.")
    normalized = bool(flags) and not special if normalized is None else normalized
    return SpecialToken(
        _text(value, key, file), number, special, lstrip, rstrip, single_word, normalized
    )


def _listed_tokens(
    config: Mapping[str, Any],
    config_file: Path,
    added_file: Path,
    special: Iterable[SpecialToken],
) -> tuple[SpecialToken, ...]:
    tokens: dict[int, SpecialToken] = {}
    texts = {token.content for token in special}
    for content, number in read_json_object(added_file, is_optional=True).items():
        if type(number) is not int or not 0 <= number <= MAX_TOKEN_ID:
            raise _wrong(added_file, content, "be a token id", number)
        is_special = content in texts
        tokens[number] = SpecialToken(content, number, is_special, normalized=not is_special)
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, Mapping):
        raise _wrong(config_file, "added_tokens_decoder", "be an object", listed)
    for key, entry in listed.items():
        number = int(key) if key.isascii() and key.isdigit() and len(key) < 11 else -1
        if not 0 <= number <= MAX_TOKEN_ID:
            raise _wrong(config_file, "added_tokens_decoder", "have token ids as keys", key)
        tokens[number] = _flagged(entry, number, f"added_tokens_decoder.{key}", config_file)
    return tuple(token for _, token in sorted(tokens.items()))


def _chat_templates(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    """The templates by name. Files go before the configuration, and empty ones do not count."""
    own, folder = file.with_name(TEMPLATE_FILE), []
    if os.path.lexists(file.with_name(TEMPLATES_FOLDER)):
        listed = tokenizer_files(file.parent).items()
        folder = [path for name, path in listed if name.startswith(f"{TEMPLATES_FOLDER}/")]
    if len(folder) > _MOST_TEMPLATES:
        raise CheckpointError(
            f"[tokenizer] '{file.parent / TEMPLATES_FOLDER}' must hold at most {_MOST_TEMPLATES} chat "
            f"templates but holds {len(folder)}. Remove those that are not used."
        )
    files = {path.stem: path for path in folder} | ({"default": own} if own.is_file() else {})
    texts = {name: read_template(path) for name, path in files.items()}
    value, written = config.get("chat_template"), {}
    named = value if isinstance(value, Mapping) else {"default": value}
    entries = [{"name": name, "template": template} for name, template in named.items()]
    for entry in () if value is None else value if isinstance(value, list) else entries:
        given = entry if isinstance(entry, Mapping) else {}
        name, text = given.get("name"), given.get("template")
        if not isinstance(name, str) or not isinstance(text, str):
            rule = "be a text or a list of objects with the texts 'name' and 'template'"
            raise _wrong(file, "chat_template", rule, value)
        if len(text.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
            raise _wrong(file, "chat_template", f"have at most {MAX_TEMPLATE_BYTES} bytes", text)
        written[name] = text
    # those that write nothing of a conversation stand for none
    texts, written = (
        {name: text for name, text in found.items() if text.strip()} for found in (texts, written)
    )
    return texts if "default" in texts else written | texts


def read_template(file: Path) -> str:
    """The text of a chat template in the folder of a checkpoint or an adapter.

    Raises:
        CheckpointError: The file cannot be read, is too large, or is not UTF-8.
    """
    try:
        return decode_text(read_limited(file, MAX_TEMPLATE_BYTES))
    except ValueError as error:
        raise CheckpointError(
            f"[tokenizer] '{file}' {error}. Save it as UTF-8, or download it again."
        ) from error


def encode_split(
    encode: Callable[[str, Before], list[int]],
    parts: Iterable[str | int],
    before: Before = "nothing",
) -> list[int]:
    """The ids of a text that was split into ids of tokens and texts between them.

    Args:
        encode: Gives the ids of a text after a given text.
        parts: The ids and texts.
        before: What stands before the first.
    """
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            before = "special"
        else:
            ids += encode(part, before)
            before = "text"
    return ids


def least_tokens(text: str, longest: int, keeps_spaces: bool = False) -> int:
    """A number of tokens that a text has at least: the characters, divided by the longest token's.

    Args:
        text: The text.
        longest: The most characters of a text that one token can stand for.
        keeps_spaces: Count spaces too, none of which the vocabulary drops.
    """
    size = len(text)
    # other threads run between two searches of a long text
    for space in () if keeps_spaces else _SPACES:
        size -= text.count(space)
    return -(-size // longest)


class Vocabulary(Protocol):
    """A vocabulary.

    Attributes:
        vocab_size: One more than the largest token id.
        bos_token_id: The token that begins a text, as the vocabulary says; `None` if it names none.
        eos_token_id: The token that ends a text, as the vocabulary says; `None` if it names none.
        frame: The ids that the vocabulary puts before and after every text.
        parses_special: Whether a special token that a text spells usually becomes that token.
        special: The special tokens.
        utf8_errors: What becomes of bytes that form no character.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    frame: tuple[list[int], list[int]]
    parses_special: bool
    special: SpecialTokens
    utf8_errors: str

    def encode(
        self, text: str, before: Before = "nothing", *, parse_special: bool = False
    ) -> list[int]: ...

    def for_threads(self) -> "Vocabulary": ...

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least, found without encoding it; 0 if none is known."""

    def id_to_piece(self, token_id: int) -> str:
        """The text of a token; `KeyError` if there is none."""

    def token_bytes(self, token_id: int, at_start: bool) -> bytes:
        """The bytes that a token adds to the text; `at_start` says that no text precedes it."""

    def token_id(self, piece: str) -> int | None: ...


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

    def __init__(self, first: int) -> None:
        self._first = first
        self.vocab_size = first + 256
        self.special = SpecialTokens([])
        self.frame: tuple[list[int], list[int]] = ([], [])

    def encode(
        self, text: str, before: Before = "nothing", *, parse_special: bool = False
    ) -> list[int]:
        """The ids of a text; there are no special tokens."""
        return [byte + self._first for byte in text.encode()]

    def least_tokens(self, text: str) -> int:
        """The characters of a text, each of which has one byte or more."""
        return len(text)

    def for_threads(self) -> "ByteVocabulary":
        """The same vocabulary, since no text takes long."""
        return self

    def id_to_piece(self, token_id: int) -> str:
        """A byte as `<0x41>`, and an id before them as `<0>`."""
        if not 0 <= token_id < self.vocab_size:
            raise KeyError(token_id)
        byte = token_id - self._first
        return f"<{token_id}>" if byte < 0 else f"<0x{byte:02X}>"

    def token_id(self, piece: str) -> int | None:
        """The id of a piece; `None` if there is none."""
        return next((n for n in range(self.vocab_size) if self.id_to_piece(n) == piece), None)

    def token_bytes(self, token_id: int, at_start: bool) -> bytes:
        """The byte that a token adds to the text."""
        if not 0 <= token_id < self.vocab_size:
            raise KeyError(token_id)
        byte = token_id - self._first
        return b"" if byte < 0 else bytes([byte])


def byte_vocabulary(folder: Path) -> ByteVocabulary | None:
    """The vocabulary of the model in a folder, if it is one that reads bytes.

    Raises:
        CheckpointError: The configuration is damaged.
    """
    config = read_json_object(folder / CONFIG_FILE, is_optional=True)
    kind, size = config.get("model_type"), config.get("vocab_size")
    if not isinstance(kind, str) or not isinstance(size, int):
        return None
    first = _FIRST_BYTES.get((kind, size))
    return None if first is None else ByteVocabulary(first)
