"""Preferences: pairs of a chosen and a rejected answer to the same prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .batches import Batch, padded_batch
from .lines import LineError, names_in, read_lines, text_of
from .samples import (
    OF_TEMPLATE,
    Encoded,
    Features,
    Sample,
    SampleEncoder,
    Samples,
    SampleTokenizer,
    common_length,
    cut,
    messages_of,
    with_rows,
)

SYSTEM = "system"
"""The key of the instruction before the prompt."""

QUESTION, INSTRUCTION, INPUT = PROMPTS = ("question", "instruction", "input")
"""Other keys of the prompt in published sets of preferences. An instruction may come with an input."""


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt.

    Attributes:
        chosen: The prompt with the answer that is preferred.
        rejected: The prompt with the other answer.
        reference: Log-probabilities of the two answers under a reference model, in nats; `None`: they
            have not been computed.
    """

    chosen: Sample
    rejected: Sample
    reference: tuple[float, float] | None = None

    @property
    def length(self) -> int:
        return max(self.chosen.length, self.rejected.length)

    @property
    def texts(self) -> tuple[Sample, ...]:
        return self.chosen, self.rejected


@dataclass(frozen=True)
class PairBatch(Batch):
    """A batch of P pairs: P rows with their chosen answers, and then P rows with the rejected ones.

    Attributes: as `Batch`, and
        reference: Log-probabilities of the answers under a reference model, float32 `(P, 2)`; `None`:
            they have not been computed.
    """

    reference: np.ndarray | None = field(kw_only=True)

    @property
    def terms(self) -> int:
        return len(self.inputs) // 2


def pair_batch(pairs: Sequence[Pair]) -> PairBatch:
    """The batch of some pairs, padded to the longest answer, rounded up."""
    rows = padded_batch([pair.chosen for pair in pairs] + [pair.rejected for pair in pairs])
    known = [pair.reference for pair in pairs if pair.reference is not None]
    reference = np.array(known, np.float32) if len(known) == len(pairs) else None
    return PairBatch(rows.inputs, rows.targets, rows.weights, rows.valid, reference=reference)


def read_pairs(
    path: Path,
    tokenizer: SampleTokenizer,
    *,
    max_length: int = 2048,
    features: Features | None = None,
    vocab_size: int | None = None,
) -> Samples[Pair]:
    """Reads and encodes a file of preferences with one JSON object on each line.

    A line holds `chosen` and `rejected`, and usually the `prompt` that they answer: texts, or lists of
    messages. The prompt may also be called `question`, `instruction` (with an `input`) or `input`, and
    follow a text under `system`. Texts are put into the chat template, or joined with the prompt if the
    model has none. Without a prompt, what both answers begin with is the prompt. Only answers are
    learned.

    Args:
        path: The file.
        tokenizer: The tokenizer of the model.
        max_length: Longer answers are cut at the end.
        features: Other names for the keys.
        vocab_size: The tokens that the model has rows for; the tokenizer may have more.

    Raises:
        TrainingError: A line cannot be used. The message names the file and the line.
    """
    encode = _PairEncoder(tokenizer, features or Features())
    found: Samples[Pair] = Samples()

    def encoded_of(line: Mapping[str, Any]) -> tuple[list[Encoded], set[str]]:
        return [with_rows(answer, vocab_size) for answer in encode(line)], encode.unread(line)

    for both, read in read_lines(path, encoded_of):
        found.unread |= read
        if max(len(encoded.tokens) for encoded in both) > max_length:
            found.truncated += 1
        chosen, rejected = (cut(encoded, max_length) for encoded in both)
        if chosen is None or rejected is None:
            found.dropped += 1
        else:
            found.samples.append(Pair(chosen, rejected))
            found.without_thoughts += any(encoded.lost_thoughts for encoded in both)
    return found


class _PairEncoder:
    """Maps a line to its two answers."""

    def __init__(self, tokenizer: SampleTokenizer, features: Features):
        self._encode = SampleEncoder(tokenizer, True, features)
        self._prompt = features.prompt
        self._answers = (features.chosen, features.rejected)
        self._of_template = OF_TEMPLATE if tokenizer.has_chat_template else ()

    def __call__(self, line: Mapping[str, Any]) -> tuple[Encoded, Encoded]:
        if any(line.get(key) is None for key in self._answers):
            raise LineError(
                f"it must have '{self._answers[0]}' and '{self._answers[1]}' but has {names_in(line)}."
            )
        keys = self._prompt_keys(line)
        prompt = self._prompt_of(line, keys)
        answers = [_answer(line[key]) for key in self._answers]
        are_lists = [isinstance(answer, list) for answer in answers]
        shared = answers[0][: common_length(*answers)] if all(are_lists) else []
        if prompt is None and not shared:
            self._check_unread(line)
        has_list = all(are_lists) if prompt is None else any(are_lists)
        if isinstance(prompt, list) or has_list or line.get(SYSTEM):
            begun = self._conversation(line, prompt, shared)
            chosen, rejected = (
                self._answered(begun, answer[len(shared) :] if shared else answer, line)
                for answer in answers
            )
        elif prompt is not None:
            chosen, rejected = (
                self._encode.completion(prompt, text_of(line, key), line) for key in self._answers
            )
        else:
            ended = [self._encode.ended([text_of(line, key)], 0) for key in self._answers]
            length = common_length(*(encoded.tokens for encoded in ended))
            chosen, rejected = (encoded._replace(prompt=length) for encoded in ended)
        return chosen, rejected

    def unread(self, line: Mapping[str, Any]) -> set[str]:
        """The keys of a line that hold something that is not read."""
        read = {*self._answers, *self._prompt_keys(line), SYSTEM, *self._of_template}
        return {name for name, value in line.items() if value is not None} - read

    def _check_unread(self, line: Mapping[str, Any]) -> None:
        """Refuses a line without a prompt that holds what may be one under another name."""
        unread = sorted(n for n in self.unread(line) if isinstance(line[n], (str, list, dict)))
        if unread:
            raise LineError(
                f"it must have its prompt under '{self._prompt}', {', '.join(map(repr, PROMPTS))}, or "
                f"in both answers, but has {', '.join(map(repr, unread))[:200]}. Name the key of the "
                "prompt as 'prompt_feature', or leave the others out."
            )

    def _prompt_keys(self, line: Mapping[str, Any]) -> tuple[str, ...]:
        """The keys that hold the prompt."""
        if line.get(self._prompt) is not None:
            return (self._prompt,)
        # sets of instructions hold an empty input where there is none
        found = tuple(name for name in PROMPTS if line.get(name))
        if len(found) > 1 and found != (INSTRUCTION, INPUT):
            raise LineError(
                f"it must have one prompt but has {' and '.join(map(repr, found))}. Name its key as "
                "'prompt_feature'."
            )
        return found

    def _prompt_of(self, line: Mapping[str, Any], keys: Sequence[str]) -> Any:
        """The prompt, a text or a list of messages; `None` if there is none."""
        if len(keys) > 1:
            return "\n".join(text_of(line, key) for key in keys)
        prompt = line[keys[0]] if keys else None
        if prompt is not None:
            messages_of(prompt, keys[0], "user")
        return prompt

    def _conversation(
        self, line: Mapping[str, Any], prompt: str | list[Any] | None, shared: Sequence[Any]
    ) -> list[Any]:
        """The messages before the answers. What both of these repeat is there once."""
        begun = [] if prompt is None else messages_of(prompt, self._prompt, "user")
        system = messages_of(text_of(line, SYSTEM), SYSTEM, SYSTEM) if line.get(SYSTEM) else []
        common = list(shared)
        if common[:1] == system:
            del common[:1]
        return [*system, *(common if common[: len(begun)] == begun else [*begun, *common])]

    def _answered(self, begun: list[Any], answer: Any, line: Mapping[str, Any]) -> Encoded:
        if not isinstance(answer, (str, list)) or not answer:
            raise LineError(
                f"'{self._answers[0]}' and '{self._answers[1]}' must be different texts or lists "
                f"of messages but one is {answer!r:.80}."
            )
        answer = messages_of(answer, self._answers[0], "assistant")
        return self._encode.chat([*begun, *answer], line, answers=len(answer))


def _answer(value: Any) -> Any:
    """An answer: a text or a list of messages, which may also be an object with them, or a message."""
    if not isinstance(value, Mapping):
        return value
    return value["messages"] if isinstance(value.get("messages"), list) else [value]
