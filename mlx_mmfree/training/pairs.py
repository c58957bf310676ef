"""Preferences: pairs of a chosen and a rejected answer to the same prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .batches import Batch, padded_batch
from .lines import LineError, read_lines, text_of
from .samples import (
    Features,
    Sample,
    SampleEncoder,
    Samples,
    SampleTokenizer,
    common_length,
    cut,
)

Encoded = tuple[list[int], int]
"""Token ids, and how many of them are the prompt."""


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
) -> Samples[Pair]:
    """Reads and encodes a file of preferences with one JSON object on each line.

    A line holds `chosen` and `rejected`, and usually the `prompt` that they answer: texts, or lists of
    messages. Texts are put into the chat template, or joined with the prompt if the model has none.
    Without a prompt, what both answers begin with is the prompt. Only answers are learned.

    Args:
        path: The file.
        tokenizer: The tokenizer of the model.
        max_length: Longer answers are cut at the end.
        features: Other names for the keys.

    Raises:
        TrainingError: A line cannot be used. The message names the file and the line.
    """
    encode = _PairEncoder(tokenizer, features or Features())
    found: Samples[Pair] = Samples()
    for both in read_lines(path, encode):
        if max(len(tokens) for tokens, _ in both) > max_length:
            found.truncated += 1
        chosen, rejected = (cut(tokens, prompt, max_length) for tokens, prompt in both)
        if chosen is None or rejected is None:
            found.dropped += 1
        else:
            found.samples.append(Pair(chosen, rejected))
    return found


class _PairEncoder:
    """Maps a line to its two answers."""

    def __init__(self, tokenizer: SampleTokenizer, features: Features):
        self._encode = SampleEncoder(tokenizer, True, features)
        self._keys = features

    def __call__(self, line: Mapping[str, Any]) -> tuple[Encoded, Encoded]:
        keys = (self._keys.chosen, self._keys.rejected)
        if not all(key in line for key in keys):
            raise LineError(
                f"it must have '{keys[0]}' and '{keys[1]}' but has "
                f"{', '.join(map(repr, line))[:200] or 'no keys'}."
            )
        answers = [line[key] for key in keys]
        prompt = line.get(self._keys.prompt)
        if isinstance(prompt, list) or all(isinstance(answer, list) for answer in answers):
            begun = self._conversation(line, answers)
            chosen, rejected = (self._answered(begun, answer, line) for answer in answers)
        elif prompt is not None:
            prompt = text_of(line, self._keys.prompt)
            chosen, rejected = (
                self._encode.completion(prompt, text_of(line, key), line) for key in keys
            )
        else:
            texts = [self._encode.ended(text_of(line, key)) for key in keys]
            shared = common_length(*texts)
            chosen, rejected = ((tokens, shared) for tokens in texts)
        return chosen, rejected

    def _conversation(self, line: Mapping[str, Any], answers: list[Any]) -> list[Any]:
        """The messages of the prompt. Those that both answers repeat are taken from them."""
        prompt = line.get(self._keys.prompt, [])
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, list):
            raise LineError(
                f"'{self._keys.prompt}' must be text or a list of messages but is "
                f"{type(prompt).__name__}."
            )
        if all(isinstance(answer, list) for answer in answers):
            shared = answers[0][: common_length(*answers)]
            for answer in answers:
                del answer[: len(shared)]
            prompt = shared if shared[: len(prompt)] == prompt else [*prompt, *shared]
        return prompt

    def _answered(self, begun: list[Any], answer: Any, line: Mapping[str, Any]) -> Encoded:
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        if not isinstance(answer, list) or not answer:
            raise LineError(
                f"'{self._keys.chosen}' and '{self._keys.rejected}' must be different texts or lists "
                f"of messages but one is {answer!r:.80}."
            )
        return self._encode.chat([*begun, *answer], line, answers=len(answer))
