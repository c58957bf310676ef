"""Fine-tuning samples from rows of data: texts, prompts with completions, or conversations."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from ..arguments import did_you_mean
from ..errors import TrainingError
from ..models.parts.token_checks import check_tokens
from ..platform.terminal import counted
from ..tokenizer.chat import check_messages, reasoning_of
from .corpus.rows import RowError, kind_of, names_in, read_rows, text_of, without_nulls

TOOLS, TEMPLATE_VARIABLES = OF_TEMPLATE = ("tools", "chat_template_kwargs")
"""The keys of a line that a chat template reads beside the messages."""

_MOST_NAMES = 8
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "tokenize")
_WRITTEN_REASONING = re.compile(r"<think>(.*?)</think>", re.DOTALL)


CONVERSATIONS = "conversations"
"""The key of ShareGPT's turns, each with who it is `from` and its `value`."""

INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"
"""The keys of Alpaca."""
SYSTEM = "system"
"""The key of a text that the model reads before a prompt."""

_ASSISTANT = "assistant"
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), _ASSISTANT),
    "system": "system",
    **dict.fromkeys(("tool", "observation"), "tool"),
}


def as_messages(line: Mapping[str, Any], key: str, *others: str) -> tuple[dict[str, Any], bool]:
    """A line with messages instead of turns in the format of ShareGPT, if it has any.

    Args:
        line: The line.
        key: The new key of the messages under `conversations` and `system`.
        others: Further keys that may hold turns.

    Returns:
        The line, and whether it was changed.

    Raises:
        RowError: A turn is of somebody unknown.
    """
    changed = dict(line)
    if line.get(CONVERSATIONS) is not None and line.get(key) is None:
        changed[key] = changed.pop(CONVERSATIONS)
        if isinstance(changed[key], list) and isinstance(changed.get("system"), str):
            system = changed.pop("system")
            changed[key] = [*([_message("system", system)] if system else []), *changed[key]]
    for name in {key, *others} & changed.keys():
        value = changed[name]
        is_list = isinstance(value, list)
        changed[name] = [_message_of(turn) for turn in value] if is_list else _message_of(value)
    return changed, changed != line


def _message_of(turn: Any) -> Any:
    """The message of a turn of ShareGPT; all else stays as it is."""
    if not isinstance(turn, Mapping) or not turn.keys() >= {"from", "value"}:
        return turn
    role = _ROLES.get(str(turn["from"]).lower())
    if role is None:
        raise RowError(
            f"a turn must be from {', '.join(_ROLES)} but is from {turn['from']!r:.60}. Write it as a "
            "message with a role."
        )
    return {"role": role, "content": turn["value"]}


class SampleTokenizer(Protocol):
    """The part of a tokenizer that samples need."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def eos_token_ids(self) -> set[int]: ...

    def encode_parts(
        self, parts: Sequence[str], parse_special: bool | None = None
    ) -> list[list[int]]: ...

    def render_chat(
        self, messages: Any, add_generation_prompt: bool = True, **variables: Any
    ) -> Any: ...


@dataclass(frozen=True)
class Sample:
    """One text to learn from.

    Attributes:
        tokens: Token ids, int32 `(n,)` with `n` at least 2.
        prompt: Number of tokens at the start that are read but not learned.
    """

    tokens: np.ndarray
    prompt: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def texts(self) -> tuple["Sample", ...]:
        return (self,)


class Example(Protocol):
    """The unit of a batch: a sample, or a pair of them.

    Attributes:
        length: Tokens of its longest text.
        texts: Its texts.
    """

    @property
    def length(self) -> int: ...

    @property
    def texts(self) -> tuple[Sample, ...]: ...


Item = TypeVar("Item", bound=Example)


@dataclass(frozen=True)
class Features:
    """The keys under which a line holds its parts.

    Attributes:
        prompt: Key of the prompt.
        completion: Key of the completion.
        chat: Key of the messages.
        text: Key of the text.
        chosen: Key of the answer that is preferred.
        rejected: Key of the other answer.
    """

    prompt: str = "prompt"
    completion: str = "completion"
    chat: str = "messages"
    text: str = "text"
    chosen: str = "chosen"
    rejected: str = "rejected"

    def meant(self, line: Mapping[str, Any]) -> str:
        """The question whether a key of a line was meant by a name that was given."""
        for each in fields(self):
            name = getattr(self, each.name)
            if name != each.default and name not in line:
                return did_you_mean(name, line)
        return ""


COUNTS = ("truncated", "dropped", "unanswered", "shortened", "without_reasoning", "converted")
"""The attributes of samples that count."""


@dataclass
class Samples(Generic[Item]):
    """The samples of one file.

    Attributes:
        samples: The samples or pairs, in the file's order.
        truncated: Number of samples that were cut to the maximum length.
        dropped: Number of samples that were left out, since they had nothing to learn.
        unanswered: Number of samples that were left out, since they had no answer of the assistant.
        shortened: Number of samples whose turns after the last answer were cut off.
        without_reasoning: Number of samples of which the chat template leaves out reasoning.
        converted: Number of lines with turns in the format of ShareGPT.
        unread: Keys of the lines that hold something that is not read.
        file: The file, as messages name it.
    """

    samples: list[Item] = field(default_factory=list)
    truncated: int = 0
    dropped: int = 0
    unanswered: int = 0
    shortened: int = 0
    without_reasoning: int = 0
    converted: int = 0
    unread: set[str] = field(default_factory=set)
    file: Path | None = None

    def add(self, other: Self) -> None:
        """Takes in the samples of a further file."""
        self.samples += other.samples
        self.unread |= other.unread
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def cut(self, line: Sequence["Encoded"], max_length: int) -> list[Sample] | None:
        """The samples of the texts of a line, of at most `max_length` tokens, which are counted.

        It is `None` if one of them has nothing to learn, and the line is left out.
        """
        if any(encoded is UNANSWERED for encoded in line):
            self.unanswered += 1
            return None
        self.truncated += any(len(encoded.tokens) > max_length for encoded in line)
        found = [
            Sample(np.array(tokens, np.int32), encoded.prompt)
            for encoded in line
            if len(tokens := encoded.tokens[:max_length]) >= max(2, encoded.prompt + 1)
        ]
        if len(found) < len(line):
            self.dropped += 1
            return None
        self.shortened += any(encoded.is_shortened for encoded in line)
        self.without_reasoning += any(encoded.lost_reasoning for encoded in line)
        return found

    def check_some(self) -> None:
        """Refuses a file without samples.

        Raises:
            TrainingError: There are none. The message names the file.
        """
        if not self.samples:
            raise TrainingError(
                f"[data] '{self.file}' must hold at least one sample with something to learn but has "
                "none. Put samples into it, or choose other data."
            )

    def content(self) -> Iterator[bytes]:
        """The fingerprint of the samples' content."""
        for sample in self.samples:
            for text in sample.texts:
                yield f"{len(text.tokens)} {text.prompt} ".encode()
                yield text.tokens.tobytes()

    def summary(self) -> str:
        """The numbers of samples and tokens as text."""
        texts = [text for sample in self.samples for text in sample.texts]
        tokens = sum(len(text.tokens) for text in texts)
        learned = sum(len(text.tokens) - max(text.prompt, 1) for text in texts)
        counts = (
            counted(count, unit)
            for count, unit in ((len(self.samples), "sample"), (tokens, "token"))
        )
        words = f"{', '.join(counts)}, {learned:,} of them learned"
        if self.truncated:
            words += f"; {self.truncated} cut to the maximum length"
        if self.dropped:
            words += f"; {self.dropped} left out, with nothing to learn"
        if self.unanswered:
            words += f"; {self.unanswered} left out, without an answer of the assistant"
        if self.shortened:
            words += f"; turns after the last answer of {self.shortened} cut off"
        if self.without_reasoning:
            words += f"; the chat template leaves out the reasoning of {self.without_reasoning}"
        if self.converted:
            words += f"; ShareGPT's turns of {self.converted} converted to messages"
        if self.unread:
            names = [f"'{name:.40}'" for name in sorted(self.unread)]
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            words += f"; not read: {', '.join(names[:_MOST_NAMES])}{more}"
        return words


def read_samples(
    path: Path,
    tokenizer: SampleTokenizer,
    *,
    max_length: int = 2048,
    mask_prompt: bool = False,
    features: Features | None = None,
    vocab_size: int | None = None,
) -> Samples[Sample]:
    """Reads and encodes the rows of a file, see `read_rows`.

    A row holds `prompt` and `completion`, or `messages`, or `text`, or Alpaca's `instruction`, `input`
    and `output`; the first of these that it has is used. A prompt and its completion are texts or lists
    of messages. They are put into the chat template, which also reads `tools` and
    `chat_template_kwargs`; texts are concatenated if there is none.

    Args:
        path: The file.
        tokenizer: The tokenizer of the model.
        max_length: Longer samples are cut at the end.
        mask_prompt: Whether to learn only the completion, or only the last answer of a conversation.
            What follows the answer is cut off, and a conversation without one is left out.
        features: Other names for the keys.
        vocab_size: The tokens that the model has rows for; the tokenizer may have more.

    Raises:
        TrainingError: A row cannot be used. The message names the file and the row.
    """
    features = features or Features()
    encode = SampleEncoder(tokenizer, mask_prompt, features)
    found: Samples[Sample] = Samples()

    def both(line: Mapping[str, Any]) -> tuple[Encoded, set[str]]:
        line, is_changed = as_messages(_with_prompt(line, features), features.chat)
        found.converted += is_changed
        return with_rows(encode(line), vocab_size), encode.unread(line)

    for encoded, read in read_rows(path, both, text_key=features.text):
        found.unread |= read
        found.samples += found.cut([encoded], max_length) or []
    return found


def _with_prompt(line: Mapping[str, Any], keys: Features) -> Mapping[str, Any]:
    """A line of Alpaca as a prompt with its completion; any other stays as it is."""
    others = ((keys.prompt, keys.completion), (keys.chat,), (CONVERSATIONS,), (keys.text,))
    has_other = any(all(line.get(name) is not None for name in format) for format in others)
    if has_other or line.get(INSTRUCTION) is None or line.get(OUTPUT) is None:
        return line
    asked = [text_of(line, key) for key in (INSTRUCTION, INPUT) if line.get(key)]
    rest = {name: value for name, value in line.items() if name not in (INSTRUCTION, INPUT, OUTPUT)}
    prompt: Any = "\n".join(asked)
    if rest.pop(SYSTEM, None):
        prompt = [_message(SYSTEM, text_of(line, SYSTEM)), _message("user", prompt)]
    return {**rest, keys.prompt: prompt, keys.completion: text_of(line, OUTPUT)}


class Encoded(NamedTuple):
    """A text as token ids.

    Attributes:
        tokens: The ids.
        prompt: How many of them are read but not learned.
        lost_reasoning: Whether the chat template left out reasoning.
        is_shortened: Whether turns after the answer were cut off.
    """

    tokens: list[int]
    prompt: int
    lost_reasoning: bool = False
    is_shortened: bool = False


UNANSWERED = Encoded([], 0)
"""A conversation without an answer to learn."""


def with_rows(encoded: Encoded, vocab_size: int | None) -> Encoded:
    """The same text, if a model with so many tokens has a row for each of its tokens.

    Raises:
        ValueError: It lacks one.
    """
    if vocab_size is not None and max(encoded.tokens, default=0) >= vocab_size:
        check_tokens(encoded.tokens, vocab_size)
    return encoded


class SampleEncoder:
    """Maps a line to its token ids and the number of those that are read but not learned."""

    def __init__(self, tokenizer: SampleTokenizer, mask_prompt: bool, features: Features):
        self._tokenizer = tokenizer
        self._mask_prompt = mask_prompt
        self._features = features

    def __call__(self, line: Mapping[str, Any]) -> Encoded:
        keys = self._features
        format = self._format(line)
        if format == (keys.text,):
            if self._mask_prompt:
                raise RowError(
                    "it must have a prompt for 'mask_prompt' but holds a text. Leave 'mask_prompt' out."
                )
            return self.ended([text_of(line, keys.text)], 0)
        if format == (keys.chat,):
            messages = line[keys.chat]
            if not isinstance(messages, list) or not messages:
                raise RowError(f"'{keys.chat}' must be a list of messages but is {messages!r:.80}.")
            return self.chat(messages, line)
        prompt, completion = line[keys.prompt], line[keys.completion]
        if isinstance(prompt, str) and isinstance(completion, str):
            return self.completion(prompt, completion, line)
        answer = messages_of(completion, keys.completion, _ASSISTANT)
        if not answer:
            raise RowError(f"'{keys.completion}' must hold a message but is empty.")
        begun = messages_of(prompt, keys.prompt, "user")
        return self.chat([*begun, *answer], line, len(begun))

    def unread(self, line: Mapping[str, Any]) -> set[str]:
        """The keys of a line that hold something that is not read."""
        format = self._format(line)
        is_chat = self._tokenizer.has_chat_template and format != (self._features.text,)
        read = {*format, *(OF_TEMPLATE if is_chat else ())}
        return {name for name, value in line.items() if value is not None} - read

    def _format(self, line: Mapping[str, Any]) -> tuple[str, ...]:
        """The keys that make the sample of a line. One that holds null counts as absent."""
        keys = self._features
        for format in ((keys.prompt, keys.completion), (keys.chat,), (keys.text,)):
            if all(line.get(name) is not None for name in format):
                return format
        is_pair = all(line.get(name) is not None for name in (keys.chosen, keys.rejected))
        pairs = " For pairs of answers, give --train-mode dpo." if is_pair else ""
        raise RowError(
            f"it must have '{keys.prompt}' and '{keys.completion}', or '{keys.chat}', or "
            f"'{keys.text}', or Alpaca's keys, but has {names_in(line)}. Name other keys by "
            "--prompt-feature and --completion-feature, --chat-feature or --text-feature."
            f"{pairs or keys.meant(line)}"
        )

    def completion(self, prompt: str, completion: str, line: Mapping[str, Any]) -> Encoded:
        """A prompt and its completion, in the chat template or concatenated."""
        if self._tokenizer.has_chat_template:
            return self.chat([_message("user", prompt), _message(_ASSISTANT, completion)], line)
        return self.ended([prompt, completion], 1 if self._mask_prompt else 0)

    def chat(
        self, messages: Sequence[Any], line: Mapping[str, Any], begun: int | None = None
    ) -> Encoded:
        """A conversation.

        Where the prompt is not learned, the answer is: the last turn of the assistant or, after the
        first `begun` messages, all from the first of its turns to the last.
        """
        self._check_has_template()
        messages, variables = without_nulls(list(messages)), _variables(line)
        first, end = 0, len(messages)
        if self._mask_prompt:
            answers = [n for n in range(begun or 0, end) if _is_answer(messages[n])]
            if not answers:
                check_messages(messages)
                return UNANSWERED
            first, end = answers[-1 if begun is None else 0], answers[-1] + 1
        is_shortened, messages = end < len(messages), messages[:end]
        whole = self._tokenizer.render_chat(messages, add_generation_prompt=False, **variables)
        lost, tokens = _loses_reasoning(messages, whole.text), whole.ids()
        if first == 0:
            return Encoded(tokens, 0, lost, is_shortened)
        prompt = self._tokenizer.render_chat(
            messages[:first], add_generation_prompt=True, **variables
        )
        # a template may begin an answer otherwise than it writes a last message
        return Encoded(tokens, common_length(tokens, prompt.ids()), lost, is_shortened)

    def unanswered(self, prompt: str | Sequence[Any], line: Mapping[str, Any]) -> Encoded:
        """A prompt that an answer is to follow, a text or messages."""
        if isinstance(prompt, str) and not self._tokenizer.has_chat_template:
            [tokens] = self._tokenizer.encode_parts([prompt], parse_special=True)
            return Encoded(tokens, len(tokens))
        self._check_has_template()
        messages = [_message("user", prompt)] if isinstance(prompt, str) else prompt
        messages = without_nulls(messages)
        chat = self._tokenizer.render_chat(messages, add_generation_prompt=True, **_variables(line))
        tokens = chat.ids()
        return Encoded(tokens, len(tokens))

    def _check_has_template(self) -> None:
        if not self._tokenizer.has_chat_template:
            raise RowError(
                "messages need a chat template but the model has none. Use a chat model, or train with "
                "a template: chat_template=FILE (--chat-template FILE)."
            )

    def ended(self, parts: Sequence[str], prompts: int) -> Encoded:
        """The tokens of a text and the one that ends it; the first `prompts` parts are not learned."""
        encoded = self._tokenizer.encode_parts(parts, parse_special=True)
        tokens = [token for part in encoded for token in part]
        ends = self._tokenizer.eos_token_ids
        if ends and not (tokens and tokens[-1] in ends):
            tokens.append(min(ends))
        return Encoded(tokens, sum(map(len, encoded[:prompts])))


def messages_of(value: Any, key: str, role: str) -> list[Any]:
    """The messages under a key: a list of them, or a text that is one of a role."""
    if isinstance(value, str):
        return [_message(role, value)]
    if not isinstance(value, list):
        raise RowError(f"'{key}' must be text or a list of messages but is {kind_of(value)}.")
    return value


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _is_answer(message: Any) -> bool:
    role = message.get("role") if isinstance(message, Mapping) else None
    return _ROLES.get(str(role).lower()) == _ASSISTANT


def _variables(line: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a line that the chat template reads beside the messages."""
    given = line.get(TEMPLATE_VARIABLES) or {}
    if not isinstance(given, Mapping) or not given.keys().isdisjoint(_RESERVED):
        raise RowError(
            f"'{TEMPLATE_VARIABLES}' must be an object without the keys {', '.join(_RESERVED)} but is "
            f"{given!r:.80}."
        )
    tools = line.get(TOOLS)
    return without_nulls({**given, TOOLS: tools})


def _loses_reasoning(messages: Sequence[Any], text: str) -> bool:
    """Returns whether a written conversation lacks reasoning that its messages hold."""
    for message in messages:
        content = message.get("content")
        found = [reasoning_of(message)]
        if isinstance(content, str) and message["role"] == _ASSISTANT:
            found += _WRITTEN_REASONING.findall(content)
        if any(isinstance(reasoning, str) and reasoning.strip() not in text for reasoning in found):
            return True
    return False


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The length of the common prefix of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
