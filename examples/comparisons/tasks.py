"""Tasks for language models: three that are generated, and the characters of a text.

A batch depends only on the seed and its number. Token 0 of the generated tasks is a mark.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np

from mlx_mmfree.training.batches import Batch
from mlx_mmfree.training.corpus.documents import read_documents

CORPUS = Path(__file__).parent.parent / "demo_corpus"
_HELD_OUT = 2**32
"""Batches from this number on are never learned from."""

Rows = tuple[np.ndarray, np.ndarray]
"""Tokens `(B, L + 1)`, and which of them are to be predicted."""


@dataclass(frozen=True)
class Task:
    """A task and its size.

    Attributes:
        name: Its name.
        vocab_size: Number of tokens.
        length: Tokens read.
        count: Pairs to recall, or special tokens of an induction.
        is_shifted: Whether the first block of a model sees the token before, whatever the mixer.
        batch_size: Sequences in a batch.
        steps: Batches that are learned from.
    """

    name: str
    vocab_size: int
    length: int
    count: int = 0
    is_shifted: bool = False
    batch_size: int = 16
    steps: int = 1000

    @property
    def is_generated(self) -> bool:
        return self.name in _GENERATED

    def batch(self, seed: int, number: int) -> Batch:
        random = np.random.Generator(np.random.Philox(key=[seed, number]))
        tokens, is_learned = (_GENERATED.get(self.name) or _excerpts)(self, random)
        weights = is_learned[:, 1:].astype(np.float32)
        return Batch(tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32), weights)

    def held_out(self, batches: int) -> Iterator[Batch]:
        """Batches of a generated task that no run learns from."""
        return (self.batch(0, _HELD_OUT + number) for number in range(batches))


def recall(task: Task, random: np.random.Generator) -> Rows:
    """Multi-query associative recall (Arora et al., arXiv 2312.04927).

    Keys and values by turns, `count` pairs of them, each key once; then as many of these keys, drawn one
    by one, each of which its value must follow. Were each key asked once, a model could do without keys
    and strike off the values that have been given.
    """
    half, rows, pairs = task.vocab_size // 2, task.batch_size, task.count
    keys = random.permuted(np.tile(np.arange(half), (rows, 1)), axis=1)[:, :pairs]
    values = random.integers(half, 2 * half, (rows, pairs))
    drawn = random.integers(0, pairs, (rows, pairs))
    asked = [np.take_along_axis(array, drawn, axis=1) for array in (keys, values)]
    shown = np.stack([keys, values], axis=2), np.stack(asked, axis=2)
    tokens = np.concatenate(shown, axis=1).reshape(rows, -1)
    is_learned = np.zeros(tokens.shape, bool)
    is_learned[:, 2 * pairs + 1 :: 2] = True
    return tokens, is_learned


def copying(task: Task, random: np.random.Generator) -> Rows:
    """Random tokens, a mark, and the same tokens again."""
    half = task.length // 2
    shown = random.integers(1, task.vocab_size, (task.batch_size, half))
    tokens = np.concatenate([shown, np.zeros((task.batch_size, 1), int), shown], axis=1)
    is_learned = np.zeros(tokens.shape, bool)
    is_learned[:, half + 1 :] = True
    return tokens, is_learned


def induction(task: Task, random: np.random.Generator) -> Rows:
    """Induction (Olsson et al., arXiv 2209.11895), in the format of Fu et al., arXiv 2212.14052.

    Random tokens with `count` special tokens at random positions. The token after the first special one
    follows the others too.
    """
    rows, pairs = task.batch_size, (task.length + 1) // 2
    tokens = random.integers(1, task.vocab_size, (rows, 2 * pairs))
    chosen = random.permuted(np.tile(np.arange(pairs), (rows, 1)), axis=1)[:, : task.count]
    positions = 2 * np.sort(chosen, axis=1)
    np.put_along_axis(tokens, positions, 0, axis=1)
    answers = np.repeat(random.integers(1, task.vocab_size, (rows, 1)), task.count, axis=1)
    np.put_along_axis(tokens, positions + 1, answers, axis=1)
    is_learned = np.zeros(tokens.shape, bool)
    np.put_along_axis(is_learned, positions[:, 1:] + 1, True, axis=1)
    return tokens, is_learned


_GENERATED: dict[str, Callable[[Task, np.random.Generator], Rows]] = {
    "recall": recall,
    "shifted recall": recall,
    "copying": copying,
    "induction": induction,
}


def _excerpts(task: Task, random: np.random.Generator) -> Rows:
    """The bytes of stories from random offsets on."""
    text = training_text()
    first = random.integers(0, len(text) - task.length, (task.batch_size, 1))
    tokens = text[first + np.arange(task.length + 1)]
    return tokens, np.ones(tokens.shape, bool)


@cache
def training_text() -> np.ndarray:
    """The bytes of all stories that are learned from."""
    return _bytes("\n\n".join(read_documents(CORPUS / "train-tinystories.txt.xz")))


@cache
def held_out_text(stories: int) -> tuple[np.ndarray, int]:
    """The bytes of the first held-out stories, and the number of their characters."""
    documents = read_documents(CORPUS / "valid-tinystories.txt.xz")
    text = "\n\n".join(islice(documents, stories))
    return _bytes(text), len(text)


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)
