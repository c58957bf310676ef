"""The tokenizer of a checkpoint: turns text into token ids and back, and writes out conversations."""

import codecs
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, shown_path
from ..files.checkpoint_files import VOCABULARY_FILES
from .chat import ChatTemplate, RenderedChat, chat_data, copy_data, join_parts, texts_in
from .sentencepiece_model import SentencePieceVocabulary
from .tokenizer_json import JsonVocabulary
from .vocabulary import (
    ENDS_OF_TURN,
    STRETCH,
    Before,
    Shield,
    SpecialToken,
    TokenizerSettings,
    Vocabulary,
    byte_vocabulary,
    read_settings,
)


def checked_id(vocabulary: Vocabulary, token_id: int | None) -> int:
    """A token id as a plain number.

    Raises:
        TypeError: The id is not a whole number.
        ValueError: The vocabulary has no such token.
    """
    try:
        number = operator.index(token_id)  # type: ignore[arg-type]
        vocabulary.id_to_piece(number)
    except TypeError as error:
        raise TypeError(
            f"[Tokenizer] 'ids' must be whole numbers in one list but got {type(token_id).__name__}. "
            "Decode the lists of a batch one by one."
        ) from error
    except KeyError as error:
        raise ValueError(
            f"[Tokenizer] 'ids' must be token ids below {vocabulary.vocab_size} that the "
            f"vocabulary has but got {number}. Use the tokenizer that belongs to the ids."
        ) from error
    return number


class Detokenizer:
    """Turns a stream of token ids into text, and never splits a character.

    All calls together give the text of `Tokenizer.decode`. Bytes that do not form a whole character yet
    are held back until the next token or `finalize`. Text that was given out never changes. The work per
    token does not grow with the length of the text.

    Args:
        vocabulary: Gives the bytes of tokens.
        known: The bytes of tokens within a text, cached after their first use; texts share them.
        skipped: The ids that add nothing to the text.
        at_start: Whether no text stands before the first token, so that a space that the vocabulary puts
            before every text is left out.

    Example:
        >>> detokenizer = tokenizer.detokenizer()  # doctest: +SKIP
        >>> for token_id in ids:  # doctest: +SKIP
        ...     print(detokenizer.add(token_id), end="", flush=True)
        >>> print(detokenizer.finalize())  # doctest: +SKIP
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        known: dict[int, bytes],
        skipped: frozenset[int] = frozenset(),
        *,
        at_start: bool = True,
    ) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._known = known
        self._decoder = codecs.getincrementaldecoder("utf-8")(vocabulary.utf8_errors)
        self._starts = self._at_start = at_start

    def add(self, token_id: int) -> str:
        """Takes one token and returns the new text, which may be empty.

        Args:
            token_id: An id of the vocabulary.

        Raises:
            ValueError: The vocabulary has no such id.
        """
        try:
            number = operator.index(token_id)
            raw = None if self._at_start else self._known.get(number)
            if raw is None:
                raw = self._vocabulary.token_bytes(number, self._at_start)
                if not self._at_start:
                    self._known[number] = raw
        except (KeyError, TypeError):
            checked_id(self._vocabulary, token_id)
            raise
        if number in self._skipped:
            return ""
        self._at_start = False
        return self._decoder.decode(raw)

    def finalize(self) -> str:
        """Returns the text that was held back, and makes the object ready for the next text."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._at_start = self._starts
        return rest


class Tokenizer:
    """The tokenizer of a checkpoint.

    `from_folder` reads one. A `tokenizer.json` is preferred to a `tokenizer.model`.

    Args:
        vocabulary: Turns text into ids and back.
        settings: What the other files of the checkpoint say.

    Attributes:
        vocab_size: One more than the largest token id.
        bos_token_id: The token that begins a text; `None` if there is none.
        eos_token_id: The token named as the end of a text; `None` if there is none.
        eos_token_ids: The tokens that end a text. Any of them ends generation.
        mask_token_id: The token that stands for a missing one; `None` if there is none.
        special_tokens: The ids of the special tokens by their text.
        given_template: The chat template of `with_chat_template`; `None`: the files' own count.

    Example:
        >>> from mlx_mmfree import demo
        >>> tokenizer = Tokenizer.from_folder(demo.path())
        >>> tokenizer.decode(tokenizer.encode("Hello", add_special_tokens=False))
        'Hello'
    """

    def __init__(self, vocabulary: Vocabulary, settings: TokenizerSettings) -> None:
        self._vocabulary = vocabulary
        self._settings = settings
        self.given_template: str | None = None
        # bytes that tokens add, by their ids
        self._known: dict[int, bytes] = {}
        self.vocab_size = vocabulary.vocab_size
        self.special_tokens = dict(vocabulary.special.ids)
        named = {key: vocabulary.token_id(text) for key, text in settings.named.items()}
        self.bos_token_id = named.get("bos_token", vocabulary.bos_token_id)
        if self.bos_token_id is None and settings.bos_token_id is not None:
            # the vocabulary may lack it
            with suppress(KeyError):
                vocabulary.id_to_piece(settings.bos_token_id)
                self.bos_token_id = settings.bos_token_id
        self.eos_token_id = eos_token_id = named.get("eos_token", vocabulary.eos_token_id)
        self.mask_token_id = named.get("mask_token")
        self.eos_token_ids = set(settings.eos_token_ids)
        if eos_token_id is not None:
            self.eos_token_ids.add(eos_token_id)
        templates = " ".join(settings.chat_templates.values())
        self.eos_token_ids.update(
            self.special_tokens[text]
            for text in ENDS_OF_TURN
            if text in self.special_tokens and text in templates
        )
        # what the settings say of the first and the last token goes before the vocabulary's frame
        self._prefix, self._suffix = vocabulary.frame
        if self.bos_token_id is not None and settings.add_bos is not None:
            rest = [number for number in self._prefix if number != self.bos_token_id]
            self._prefix = [self.bos_token_id, *rest] if settings.add_bos else rest
        if eos_token_id is not None and settings.add_eos is not None:
            rest = [number for number in self._suffix if number != eos_token_id]
            self._suffix = [*rest, eos_token_id] if settings.add_eos else rest

    @classmethod
    def from_folder(cls, folder: Path | str) -> "Tokenizer":
        """Reads the tokenizer files of a checkpoint folder.

        Args:
            folder: The folder, with a `tokenizer.json`, a `tokenizer.model` or a `spiece.model`. A model
                that reads bytes needs none.

        Raises:
            CheckpointError: A file is missing or damaged.
            UnsupportedModelError: A file asks for something that is not implemented.
        """
        folder = Path(folder)
        json_file, *model_files = (folder / name for name in VOCABULARY_FILES)
        settings = read_settings(folder)
        if json_file.exists():
            return cls(JsonVocabulary(json_file, settings), settings)
        for model_file in model_files:
            if model_file.exists():
                return cls(SentencePieceVocabulary(model_file, settings), settings)
        vocabulary = byte_vocabulary(folder)
        if vocabulary is not None:
            return cls(vocabulary, settings)
        source = Path(shown_path(str(folder)))
        if source != folder:
            raise CheckpointError(
                f"[tokenizer] '{source}' must hold a vocabulary but has none. Copy the tokenizer files "
                f"of the original checkpoint to '{source.parent}', or load the model alone."
            )
        raise CheckpointError(
            f"[tokenizer] '{folder}' must hold 'tokenizer.json' or 'tokenizer.model' but has neither. "
            "Copy the tokenizer files of the original checkpoint there, or load the model alone."
        )

    @property
    def folder(self) -> Path:
        """The folder that it was read from."""
        return self._settings.folder

    @property
    def listed_tokens(self) -> tuple[SpecialToken, ...]:
        """The tokens that the files list beside the vocabulary, special or not."""
        return self._settings.tokens

    @property
    def chat_templates(self) -> dict[str, str]:
        """The Jinja sources of the chat templates by name; the usual one is named `default`."""
        return dict(self._settings.chat_templates)

    @property
    def has_chat_template(self) -> bool:
        """True if the files hold a chat template."""
        return bool(self._settings.chat_templates)

    def with_chat_template(self, source: str) -> "Tokenizer":
        """A tokenizer of the same tokens that writes conversations with another chat template.

        Models and adapters that are saved with it get the template too.

        Args:
            source: The template in Jinja.

        Example:
            >>> from mlx_mmfree import demo
            >>> template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}"
            >>> tokenizer = Tokenizer.from_folder(demo.path()).with_chat_template(template)
            >>> tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
            'user: Hi\\n'
        """
        settings = replace(self._settings, chat_templates={"default": source})
        changed = type(self)(self._vocabulary, settings)
        changed.given_template = source
        return changed

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool | None = None
    ) -> list[int]:
        """Turns a text into token ids.

        Args:
            text: Any valid Unicode text.
            add_special_tokens: Add the tokens before and after the text that the files ask for, such as
                the BOS token.
            parse_special: Whether a special token that the text spells becomes that token. The default
                depends on the file format: yes for `tokenizer.json`, no for `tokenizer.model`.

        Raises:
            TypeError: The text is not a `str`.
            ValueError: The text holds a lone surrogate.
        """
        _check_text(text)
        if parse_special is None:
            parse_special = self._vocabulary.parses_special
        ids = self._vocabulary.encode(text, parse_special=parse_special)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_parts(
        self, parts: Sequence[str], parse_special: bool | None = None
    ) -> list[list[int]]:
        """Turns a text that comes in parts into token ids, part by part.

        The tokens that the files put before a text begin the first part, and those after it end the last
        one. A text that spells them already gets them once.

        Args:
            parts: At least one text.
            parse_special: As for `encode`.

        Raises:
            TypeError: A text is not a `str`.
            ValueError: A text holds a lone surrogate.
        """
        for text in parts:
            _check_text(text)
        if parse_special is None:
            parse_special = self._vocabulary.parses_special
        found: list[list[int]] = []
        for text in self._without_first_token(parts) if parse_special else parts:
            before = self._before(found)
            found.append(self._vocabulary.encode(text, before, parse_special=parse_special))
        if found[0][: len(self._prefix)] != self._prefix:
            found[0] = [*self._prefix, *found[0]]
        if found[-1][len(found[-1]) - len(self._suffix) :] != self._suffix:
            found[-1] = [*found[-1], *self._suffix]
        return found

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least, found without encoding it.

        It is 0 for a vocabulary of which it is not known how much of a text one token may stand for.
        """
        return self._vocabulary.least_tokens(text)

    def for_threads(self) -> "Tokenizer":
        """The same tokenizer, for programs whose other threads go on while it encodes a long text."""
        other = copy(self)
        other._vocabulary = self._vocabulary.for_threads()
        return other

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Turns token ids into a text. Bytes that form no character become U+FFFD.

        Args:
            ids: Token ids, a list or a one-dimensional array.
            skip_special_tokens: Leave out the special tokens.

        Raises:
            TypeError: The ids are not whole numbers in one list.
            ValueError: The vocabulary lacks one of the ids.
        """
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        if not isinstance(ids, Iterable):
            raise TypeError(
                f"[Tokenizer] 'ids' must be a list of token ids but got {type(ids).__name__}. Put a "
                "single id into a list."
            )
        detokenizer = self.detokenizer(skip_special_tokens)
        return "".join(map(detokenizer.add, ids)) + detokenizer.finalize()

    def detokenizer(
        self, skip_special_tokens: bool = False, *, after: Collection[int] = ()
    ) -> Detokenizer:
        """A `Detokenizer`, which takes ids one by one and gives the text that is known so far.

        Args:
            skip_special_tokens: Leave out the special tokens.
            after: The ids that stand before. If they have a text, the first token's space belongs to
                what follows it.
        """
        special = self._vocabulary.special.id_set
        skipped = special if skip_special_tokens else frozenset()
        at_start = all(token in special for token in after)
        return Detokenizer(self._vocabulary, self._known, skipped, at_start=at_start)

    def id_to_piece(self, token_id: int) -> str:
        """The text of one token as the vocabulary file spells it.

        Raises:
            ValueError: The vocabulary has no such token.
        """
        return self._vocabulary.id_to_piece(checked_id(self._vocabulary, token_id))

    def token_id(self, piece: str) -> int | None:
        """The id of the token that the vocabulary file spells so; `None` if there is none."""
        return self._vocabulary.token_id(piece)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text that it does not begin.

        Raises:
            ValueError: The vocabulary has no such token.
        """
        number = checked_id(self._vocabulary, token_id)
        return self._vocabulary.token_bytes(number, at_start=False)

    def chat_template_source(self, *, tools: bool = False) -> str:
        """The Jinja source of the chat template, or of the one for tools if there are two.

        Raises:
            CheckpointError: There is no template.
        """
        return self._chat_template(tools).source

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """Writes out a conversation in the format that the model was trained on.

        Special tokens that a message spells stay plain text, so that a message cannot end its own turn.
        While the ids are made, the template sees as many other characters instead. The ids begin with
        the first token of texts where the template writes it, as in transformers and mlx-lm; the ids of
        a GGUF file and of BitNet b1.58 2B4T in any case, as in llama.cpp and the publishers' program.

        Args:
            messages: The conversation. Each message has a `role` and usually a `content`: a text, or a
                list of parts with texts.
            add_generation_prompt: End with the words that begin the model's answer.
            tokenize: Return ids; otherwise return the text.
            variables: Further values for the template by name, such as `tools`.

        Raises:
            CheckpointError: There is no template, or it cannot be used.
            UsageError: The template refuses the messages, or a value is not plain data.
        """
        if tokenize:
            return self.render_chat(messages, add_generation_prompt, **variables).ids()
        template, data = self._chat(messages, add_generation_prompt, variables)
        return template.render(data | self._settings.named)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> RenderedChat:
        """Writes out a conversation as `apply_chat_template` does, for both its text and its ids."""
        template, data = self._chat(messages, add_generation_prompt, variables)
        shield = Shield(self._vocabulary.special, [template.source, *texts_in(data)])
        rendered = template.render(copy_data(data, shield.cover) | self._settings.named)
        _check_text(rendered)
        takes_first = self._settings.begins_chats and self.bos_token_id in self._prefix
        first = self.bos_token_id if takes_first else None
        return RenderedChat(rendered, shield, self._vocabulary, first)

    def encode_continuation(self, text: str, parse_special: bool = False) -> list[int]:
        """Turns a text that follows other text into ids.

        Args:
            text: The text.
            parse_special: Whether a special token that it spells becomes that token.

        Raises:
            TypeError: The text is not a `str`.
            ValueError: The text holds a lone surrogate.
        """
        _check_text(text)
        return self._vocabulary.encode(text, "text", parse_special=parse_special)

    def _without_first_token(self, parts: Sequence[str]) -> Sequence[str]:
        """The parts of a text without the BOS token, if they spell it."""
        if self.bos_token_id not in self._prefix:
            return parts
        special = self.special_tokens.items()
        spelled = (re.escape(text) for text, token in special if token == self.bos_token_id)
        return [re.sub(rf"\A(?:{'|'.join(spelled)})+", "", parts[0]), *parts[1:]]

    def _before(self, parts: Sequence[Sequence[int]]) -> Before:
        """The tokens before a text that follows others."""
        last = next((ids[-1] for ids in reversed(parts) if ids), None)
        if last is None:
            return "nothing"
        return "special" if last in self._vocabulary.special.id_set else "text"

    def _chat(
        self, messages: Any, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> tuple[ChatTemplate, dict[str, Any]]:
        """The template of a conversation, and what it may read beside the special tokens."""
        data = chat_data(messages, add_generation_prompt, variables)
        template = self._chat_template(tools=data.get("tools") is not None)
        has_parts = any(isinstance(message.get("content"), list) for message in data["messages"])
        if has_parts and not template.reads_parts(self._settings.named):
            data["messages"] = join_parts(data["messages"])
        return template, data

    def _chat_template(self, tools: bool) -> ChatTemplate:
        templates = self._chat_templates
        if not templates:
            raise CheckpointError(
                f"[chat template] '{self._settings.folder}' must hold a chat template but has none. Use "
                "a model tuned for chat, give one by tokenizer.with_chat_template(text), or encode a "
                "plain prompt."
            )
        names = ["tool_use", "default"] if tools else ["default"]
        names += list(templates) if len(templates) == 1 else []
        for name in names:
            if name in templates:
                return templates[name]
        raise CheckpointError(
            f"[chat template] '{self._settings.folder}' must name one chat template 'default' but names "
            f"{', '.join(map(repr, templates))}. Write the one to use to 'chat_template.jinja'."
        )

    @cached_property
    def _chat_templates(self) -> dict[str, ChatTemplate]:
        sources = self._settings.chat_templates
        return {name: ChatTemplate(text, self._settings.folder) for name, text in sources.items()}


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(
            f"[Tokenizer] 'text' must be a str but got {type(text).__name__}. Decode bytes first."
        )
    # in parts, between which other threads run
    for start in range(0, len(text), STRETCH):
        try:
            text[start : start + STRETCH].encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"[Tokenizer] 'text' must be valid Unicode but has a lone surrogate at position "
                f"{start + error.start}. Leave it out, or decode the text with errors='replace'."
            ) from error
