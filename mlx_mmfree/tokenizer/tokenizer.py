"""Text to token ids and back, as the files of a checkpoint say."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ..errors import CheckpointError, UsageError
from .chat.chat_template import ChatTemplate, copy_data, texts_in
from .chat.rendered_chat import RenderedChat
from .detokenizer import Detokenizer, TokenSource
from .sentencepiece_model import SentencePieceVocabulary
from .special_tokens import ENDS_OF_TURN, Shield, SpecialTokens
from .tokenizer_files import TokenizerSettings, read_settings
from .tokenizer_json import JsonVocabulary


class Vocabulary(TokenSource, Protocol):
    """What the tokenizer asks of a vocabulary, whatever its file format."""

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    frame: tuple[list[int], list[int]]
    parses_special: bool
    special: SpecialTokens

    def encode_parsed(self, text: str) -> list[int]: ...

    def encode_plain(self, text: str, at_start: bool = True) -> list[int]: ...

    def piece(self, token_id: int) -> str: ...

    def token_id(self, piece: str) -> int | None: ...


class Tokenizer:
    """The tokenizer of a checkpoint.

    Read one with :meth:`from_folder`; a ``tokenizer.json`` goes before a ``tokenizer.model``.

    Attributes:
        vocab_size: one more than the largest token id.
        bos_token_id: the token that begins a text, or None.
        eos_token_id: the token named as the end of a text, or None.
        eos_token_ids: the tokens that end a text; any of them ends generation.
        special_tokens: ids of the control tokens by their text.

    Example:
        >>> tokenizer = Tokenizer.from_folder(Path("checkpoint"))  # doctest: +SKIP
        >>> tokenizer.decode(tokenizer.encode("Hello", False))  # doctest: +SKIP
        'Hello'
    """

    def __init__(self, vocabulary: Vocabulary, settings: TokenizerSettings) -> None:
        self._vocabulary = vocabulary
        self._settings = settings
        self.vocab_size = vocabulary.vocab_size
        self.special_tokens = dict(vocabulary.special.ids)
        self.bos_token_id = self._named_id("bos_token", vocabulary.bos_token_id)
        if self.bos_token_id is None and _has_token(vocabulary, settings.bos_token_id):
            self.bos_token_id = settings.bos_token_id
        eos_token_id = self._named_id("eos_token", vocabulary.eos_token_id)
        self.eos_token_id = eos_token_id
        self.eos_token_ids = set(settings.eos_token_ids)
        if eos_token_id is not None:
            self.eos_token_ids.add(eos_token_id)
        templates = " ".join(settings.chat_templates.values())
        self.eos_token_ids.update(
            self.special_tokens[text]
            for text in ENDS_OF_TURN
            if text in self.special_tokens and text in templates
        )
        prefix, suffix = vocabulary.frame
        for token_id in (*prefix, *suffix):
            if not _has_token(vocabulary, token_id):
                raise CheckpointError(
                    f"'{settings.folder}': the tokenizer must put tokens of its vocabulary around "
                    f"a text but puts {token_id}. Download the tokenizer files again."
                )
        self._prefix = _with_token(prefix, self.bos_token_id, settings.add_bos, at_end=False)
        self._suffix = _with_token(suffix, eos_token_id, settings.add_eos, at_end=True)

    @classmethod
    def from_folder(cls, folder: Path | str) -> "Tokenizer":
        """Reads the tokenizer files of a checkpoint folder.

        Args:
            folder: the folder; it needs ``tokenizer.json`` or ``tokenizer.model``.

        Raises:
            CheckpointError: the files are missing or damaged.
            UnsupportedModelError: the files ask for something that is not implemented.
        """
        folder = Path(folder)
        json_file, model_file = folder / "tokenizer.json", folder / "tokenizer.model"
        settings = read_settings(folder)
        if json_file.exists():
            return cls(JsonVocabulary(json_file, settings), settings)
        if model_file.exists():
            return cls(SentencePieceVocabulary(model_file, settings), settings)
        raise CheckpointError(
            f"'{folder}' must hold 'tokenizer.json' or 'tokenizer.model' but has neither. "
            "Copy the tokenizer files of the original checkpoint there, or load the model alone."
        )

    @property
    def folder(self) -> Path:
        """Where its files lie."""
        return self._settings.folder

    @property
    def has_chat_template(self) -> bool:
        """Whether the files say how to write a conversation."""
        return bool(self._settings.chat_templates)

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool | None = None
    ) -> list[int]:
        """Cuts a text into token ids.

        Args:
            text: any valid Unicode text.
            add_special_tokens: put the tokens around the text that the files ask for, such as
                one token for its beginning.
            parse_special: whether a special token spelled in the text becomes that token. The
                default is the file format's own: yes for ``tokenizer.json``, no for
                ``tokenizer.model``.

        Raises:
            ValueError: the text holds a lone surrogate.
        """
        _check_text(text)
        if self._vocabulary.parses_special if parse_special is None else parse_special:
            ids = self._vocabulary.encode_parsed(text)
        else:
            ids = self._vocabulary.encode_plain(text)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Joins token ids to a text; bytes that form no character become U+FFFD.

        Args:
            ids: token ids, a list or a one-dimensional array.
            skip_special_tokens: leave out the control tokens.

        Raises:
            ValueError: the vocabulary lacks one of the ids.
        """
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        detokenizer = self.detokenizer(skip_special_tokens)
        return "".join(map(detokenizer.add, ids)) + detokenizer.finalize()

    def detokenizer(self, skip_special_tokens: bool = False) -> Detokenizer:
        """A :class:`Detokenizer`, which takes ids one by one and gives the text so far known."""
        skipped = self._vocabulary.special.id_set if skip_special_tokens else frozenset()
        return Detokenizer(_CheckedSource(self._vocabulary), skipped)

    def piece(self, token_id: int) -> str:
        """The text of one token as the vocabulary file spells it."""
        return self._vocabulary.piece(_checked_id(self._vocabulary, token_id))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """Writes a conversation the way the model was taught.

        Special tokens spelled inside a message stay plain text, so a message cannot end its own
        turn; the template sees them as other characters of the same number while the ids are
        made. Where texts begin with a token that the template does not write, the ids get it.

        Args:
            messages: the conversation, each message with a ``role`` and usually a ``content``.
            add_generation_prompt: end with the words that begin the model's answer.
            tokenize: return ids; otherwise the text.
            variables: further names for the template, such as ``tools``.

        Raises:
            CheckpointError: there is no template or it cannot be used.
            UsageError: the template refuses the messages.
        """
        if tokenize:
            return self.render_chat(messages, add_generation_prompt, **variables).ids()
        data = _chat_data(messages, add_generation_prompt, variables)
        template = self._chat_template(tools="tools" in variables)
        return template.render(data | self._settings.named)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> RenderedChat:
        """Writes a conversation as :meth:`apply_chat_template` does, for its text and its ids."""
        data = _chat_data(messages, add_generation_prompt, variables)
        template = self._chat_template(tools="tools" in variables)
        shield = Shield(self._vocabulary.special, [template.source, *texts_in(data)])
        rendered = template.render(copy_data(data, shield.cover) | self._settings.named)
        _check_text(rendered)
        first = self.bos_token_id if self.bos_token_id in self._prefix else None
        return RenderedChat(rendered, shield, self._vocabulary, first)

    def encode_continuation(self, text: str) -> list[int]:
        """Cuts a text that follows other text into ids; special tokens in it stay plain text.

        Raises:
            ValueError: the text holds a lone surrogate.
        """
        _check_text(text)
        return self._vocabulary.encode_plain(text, at_start=False)

    def _chat_template(self, tools: bool) -> ChatTemplate:
        templates = self._chat_templates
        if not templates:
            raise CheckpointError(
                f"'{self._settings.folder}' must hold a chat template but has none. Use a model "
                "tuned for chat, add a 'chat_template.jinja', or encode a plain prompt."
            )
        names = ["tool_use", "default"] if tools else ["default"]
        names += list(templates) if len(templates) == 1 else []
        for name in names:
            if name in templates:
                return templates[name]
        raise CheckpointError(
            f"'{self._settings.folder}' must name one chat template 'default' but names "
            f"{', '.join(map(repr, templates))}. Write the one to use to 'chat_template.jinja'."
        )

    @cached_property
    def _chat_templates(self) -> dict[str, ChatTemplate]:
        sources = self._settings.chat_templates
        return {name: ChatTemplate(text, self._settings.folder) for name, text in sources.items()}

    def _named_id(self, key: str, default: int | None) -> int | None:
        text = self._settings.named.get(key)
        return default if text is None else self._vocabulary.token_id(text)


class _CheckedSource:
    """A vocabulary whose tokens are looked up once and whose missing ids are explained."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known: dict[int, bytes] = {}
        self.utf8_errors = vocabulary.utf8_errors

    def token_bytes(self, token_id: int, at_start: bool) -> bytes:
        if not at_start and token_id in self._known:
            return self._known[token_id]
        raw = self._vocabulary.token_bytes(_checked_id(self._vocabulary, token_id), at_start)
        if not at_start:
            self._known[token_id] = raw
        return raw


def _has_token(vocabulary: Vocabulary, token_id: int | None) -> bool:
    try:
        return token_id is not None and vocabulary.piece(token_id) is not None
    except KeyError:
        return False


def _checked_id(vocabulary: Vocabulary, token_id: int) -> int:
    number = operator.index(token_id)
    if not _has_token(vocabulary, number):
        raise ValueError(
            f"[Tokenizer] 'ids' must be token ids below {vocabulary.vocab_size} that the "
            f"vocabulary has but got {number}."
        )
    return number


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"[Tokenizer] 'text' must be a str but got {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"[Tokenizer] 'text' must be valid Unicode but has a lone surrogate at position "
            f"{error.start}."
        ) from error


def _chat_data(
    messages: Any, add_generation_prompt: bool, variables: Mapping[str, Any]
) -> dict[str, Any]:
    data = copy_data({**variables, "messages": _checked_messages(messages)})
    return {**data, "add_generation_prompt": bool(add_generation_prompt)}


def _checked_messages(messages: Any) -> list[Any]:
    if isinstance(messages, (list, tuple)) and messages:
        if all(isinstance(message, Mapping) and "role" in message for message in messages):
            return list(messages)
        messages = next(m for m in messages if not (isinstance(m, Mapping) and "role" in m))
    raise UsageError(
        "[apply_chat_template] 'messages' must be a list of at least one object with 'role' and "
        f"'content' but got {messages!r:.60}."
    )


def _with_token(
    ids: list[int], token_id: int | None, wanted: bool | None, *, at_end: bool
) -> list[int]:
    """The frame of a text with one token there exactly once, or not at all."""
    if wanted is None or token_id is None:
        return ids
    rest = [number for number in ids if number != token_id]
    if not wanted:
        return rest
    return [*rest, token_id] if at_end else [token_id, *rest]
