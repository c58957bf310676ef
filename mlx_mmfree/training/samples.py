"""Reads fine-tuning samples from JSON lines: texts, prompts with completions, or conversations."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from ..errors import TrainingError
from .lines import LineError, read_lines, text_of

SPLITS = ("train", "valid", "test")


class SampleTokenizer(Protocol):
    """What the samples need of a tokenizer."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def eos_token_ids(self) -> set[int]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(
        self,
        messages: Any,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any: ...


@dataclass(frozen=True)
class Sample:
    """One text to learn from.

    Attributes:
        tokens: Token ids, int32 `(n,)` with `n` at least 2.
        prompt: Number of tokens at the beginning that are read but not learned.
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
    """What a batch is made of: a sample, or a pair of them.

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


@dataclass
class Samples(Generic[Item]):
    """The samples of one file.

    Attributes:
        samples: The samples or pairs, in the file's order.
        truncated: Number of samples that were cut to the maximum length.
        dropped: Number of samples that were left out, since they had nothing to learn.
    """

    samples: list[Item] = field(default_factory=list)
    truncated: int = 0
    dropped: int = 0

    def content(self) -> Iterator[bytes]:
        """What tells the content of the samples."""
        for sample in self.samples:
            for text in sample.texts:
                yield f"{len(text.tokens)} {text.prompt} ".encode()
                yield text.tokens.tobytes()

    def summary(self) -> str:
        """The numbers of samples and tokens in words."""
        texts = [text for sample in self.samples for text in sample.texts]
        tokens = sum(len(text.tokens) for text in texts)
        learned = sum(len(text.tokens) - max(text.prompt, 1) for text in texts)
        words = f"{len(self.samples)} samples, {tokens:,} tokens, {learned:,} of them learned"
        if self.truncated:
            words += f"; {self.truncated} cut to the maximum length"
        if self.dropped:
            words += f"; {self.dropped} left out, with nothing to learn"
        return words


def find_splits(folder: Path) -> dict[str, Path]:
    """The files `train.jsonl`, `valid.jsonl` and `test.jsonl` that a folder has."""
    if not folder.is_dir():
        raise TrainingError(
            f"[data] 'data' must be a folder with train.jsonl, valid.jsonl or test.jsonl, or a dataset "
            f"of the Hub, but '{folder}' is neither."
        )
    return {
        name: folder / f"{name}.jsonl" for name in SPLITS if (folder / f"{name}.jsonl").is_file()
    }


def read_samples(
    path: Path,
    tokenizer: SampleTokenizer,
    *,
    max_length: int = 2048,
    mask_prompt: bool = False,
    features: Features | None = None,
) -> Samples[Sample]:
    """Reads and encodes a file with one JSON object on each line.

    A line holds `prompt` and `completion`, or `messages` (with `tools` if the chat template takes
    them), or `text`; the first of these that it has is used. A prompt and its completion are put into
    the chat template, or joined if the model has none.

    Args:
        path: The file.
        tokenizer: The tokenizer of the model.
        max_length: Longer samples are cut at the end.
        mask_prompt: Whether to learn only the completion, or only the last message.
        features: Other names for the keys.

    Raises:
        TrainingError: A line cannot be used. The message names the file and the line.
    """
    encode = SampleEncoder(tokenizer, mask_prompt, features or Features())
    found: Samples[Sample] = Samples()
    for tokens, prompt in read_lines(path, encode):
        if len(tokens) > max_length:
            found.truncated += 1
        sample = cut(tokens, prompt, max_length)
        if sample is None:
            found.dropped += 1
        else:
            found.samples.append(sample)
    return found


def cut(tokens: Sequence[int], prompt: int, max_length: int) -> Sample | None:
    """A sample of at most `max_length` tokens, or `None` if it has nothing to learn."""
    tokens = tokens[:max_length]
    if len(tokens) < 2 or prompt >= len(tokens):
        return None
    return Sample(np.array(tokens, np.int32), prompt)


class SampleEncoder:
    """Maps a line to its token ids and the number of those that are read but not learned."""

    def __init__(self, tokenizer: SampleTokenizer, mask_prompt: bool, features: Features):
        self._tokenizer = tokenizer
        self._mask_prompt = mask_prompt
        self._features = features

    def __call__(self, line: Mapping[str, Any]) -> tuple[list[int], int]:
        keys = self._features
        if keys.prompt in line and keys.completion in line:
            return self.completion(text_of(line, keys.prompt), text_of(line, keys.completion), line)
        if keys.chat in line:
            return self.chat(line[keys.chat], line)
        if keys.text not in line:
            raise LineError(
                f"it must have '{keys.prompt}' and '{keys.completion}', or '{keys.chat}', or "
                f"'{keys.text}' but has {', '.join(map(repr, line))[:200] or 'no keys'}."
            )
        if self._mask_prompt:
            raise LineError(
                "it must have a prompt for 'mask_prompt' but holds a text. Leave 'mask_prompt' out."
            )
        return self.ended(text_of(line, keys.text)), 0

    def completion(
        self, prompt: str, completion: str, line: Mapping[str, Any]
    ) -> tuple[list[int], int]:
        """A prompt and its completion, in the chat template or joined."""
        if self._tokenizer.has_chat_template:
            messages = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": completion},
            ]
            return self.chat(messages, line)
        before = self._tokenizer.encode(prompt)
        after = self._tokenizer.encode(completion, add_special_tokens=False)
        return self._ended(before + after), len(before) if self._mask_prompt else 0

    def chat(
        self, messages: Any, line: Mapping[str, Any], answers: int = 1
    ) -> tuple[list[int], int]:
        """A conversation, whose last `answers` messages are learned where the prompt is not."""
        if not isinstance(messages, list) or not messages:
            raise LineError(
                f"'{self._features.chat}' must be a list of messages but is {messages!r:.80}."
            )
        variables = {"tools": line["tools"]} if line.get("tools") is not None else {}
        render: Callable[..., list[int]] = self._tokenizer.apply_chat_template
        tokens = render(messages, add_generation_prompt=False, **variables)
        if not self._mask_prompt or len(messages) <= answers:
            return tokens, 0
        first = messages[-answers]
        is_answer = isinstance(first, Mapping) and first.get("role") == "assistant"
        prompt = render(messages[:-answers], add_generation_prompt=is_answer, **variables)
        # a template may begin an answer otherwise than it writes a last message
        return tokens, common_length(tokens, prompt)

    def ended(self, text: str) -> list[int]:
        """The tokens of a text and the one that ends it."""
        return self._ended(self._tokenizer.encode(text))

    def _ended(self, tokens: list[int]) -> list[int]:
        ends = self._tokenizer.eos_token_ids
        return tokens if not ends or (tokens and tokens[-1] in ends) else [*tokens, min(ends)]


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many values at the beginning of two sequences are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
