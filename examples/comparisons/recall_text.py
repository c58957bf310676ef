"""Lines of text that ask for words they have named before, and how many answers a model knows."""

from collections.abc import Sequence
from random import Random

import mlx.core as mx
import numpy as np

from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.models import Decoder

KEYS = tuple(["ant", "bat", "bee", "cat", "cow", "dog", "fox", "hen", "owl", "pig", "rat", "yak"])
VALUES = tuple(["box", "cup", "hat", "jam", "key", "map", "nut", "pan", "pen", "pot", "rug", "toy"])
PAIRS = 4
_AT_A_TIME = 50


def recall_line(random: Random, pairs: int = PAIRS) -> tuple[str, list[tuple[str, str]]]:
    """What some animals have, and then the same again in another order (arXiv 2312.04927).

    Returns:
        The line up to its questions, and each question with its answer.
    """
    keys = random.sample(KEYS, pairs)
    has = {key: random.choice(VALUES) for key in keys}
    told = ", ".join(f"{key} has {has[key]}" for key in keys)
    asked = [(f" The {key} has", f" {has[key]}.") for key in random.sample(keys, pairs)]
    return f"Who has what: {told}.", asked


def with_recall(documents: Sequence[str], seed: int, every: int, lines: int) -> list[str]:
    """Documents, and after so many of them so many lines of recall, each a document."""
    random = Random(seed)
    mixed = []
    for number, document in enumerate(documents):
        mixed.append(document)
        for _ in range(lines if number % every == every - 1 else 0):
            told, asked = recall_line(random)
            mixed.append(told + "".join(question + answer for question, answer in asked))
    return mixed


def recall_accuracy(
    model: Decoder, tokenizer: Tokenizer, lines: int = 200, seed: int = 2**20
) -> float:
    """The share of answers of which the model finds every token the likeliest."""
    random = Random(seed)
    texts = [_with_answers(tokenizer, *recall_line(random)) for _ in range(lines)]
    right = []
    for first in range(0, lines, _AT_A_TIME):
        part = texts[first : first + _AT_A_TIME]
        length = max(len(ids) for ids, _ in part)
        # what comes behind a text changes nothing in it
        rows = np.array([ids + [0] * (length - len(ids)) for ids, _ in part], np.int32)
        found = np.array(mx.argmax(model(mx.array(rows))[0], axis=-1))
        for row, (ids, places) in zip(found, part, strict=True):
            right += [row[n - 1 : end - 1].tolist() == ids[n:end] for n, end in places]
    return sum(right) / len(right)


def _with_answers(
    tokenizer: Tokenizer, told: str, asked: Sequence[tuple[str, str]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """The ids of a line, and where those of each answer begin and end."""
    ids, places = list(tokenizer.encode(told)), []
    for question, answer in asked:
        ids += tokenizer.encode_continuation(question)
        start = len(ids)
        ids += tokenizer.encode_continuation(answer)
        places.append((start, len(ids)))
    return ids, places
