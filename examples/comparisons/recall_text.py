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


def recall_line(random: Random, questions: int = 0) -> tuple[str, list[tuple[str, str]]]:
    """Facts about four animals, and questions after them (arXiv 2312.04927).

    Args:
        random: The source of the line.
        questions: How many questions, whose animals may repeat; 0 asks for each animal once.

    Returns:
        The line up to its questions, and each question with its answer.
    """
    keys = random.sample(KEYS, PAIRS)
    has = {key: random.choice(VALUES) for key in keys}
    if questions:
        reported = ", ".join(f"{key} {has[key]}" for key in keys)
        asked = random.choices(keys, k=questions)
        return f"Who has what: {reported},", [(f" {key}", f" {has[key]},") for key in asked]
    reported = ", ".join(f"{key} has {has[key]}" for key in keys)
    asked = random.sample(keys, PAIRS)
    return f"Who has what: {reported}.", [(f" The {key} has", f" {has[key]}.") for key in asked]


def with_recall(
    documents: Sequence[str], seed: int, every: int, lines: int, questions: int = 0
) -> list[str]:
    """Documents, and after so many of them so many lines of recall, each a document."""
    random = Random(seed)
    mixed = []
    for number, document in enumerate(documents):
        mixed.append(document)
        for _ in range(lines if number % every == every - 1 else 0):
            reported, asked = recall_line(random, questions)
            mixed.append(reported + "".join(question + answer for question, answer in asked))
    return mixed


def recall_accuracy(
    model: Decoder, tokenizer: Tokenizer, questions: int = 0, seed: int = 2**20
) -> float:
    """The share of answers of which the model finds every token the likeliest.

    Of a model whose lines have `questions` whose animals may repeat, only a first question counts: to a
    later one, an answer before it may be the same.
    """
    random, lines = Random(seed), 800 if questions else 200
    texts = [
        _with_answers(tokenizer, *recall_line(random, min(questions, 1))) for _ in range(lines)
    ]
    right = []
    for first in range(0, lines, _AT_A_TIME):
        part = texts[first : first + _AT_A_TIME]
        length = max(len(ids) for ids, _ in part)
        # what comes after a text changes nothing in it
        rows = np.array([ids + [0] * (length - len(ids)) for ids, _ in part], np.int32)
        found = np.array(mx.argmax(model(mx.array(rows))[0], axis=-1))
        for row, (ids, spans) in zip(found, part, strict=True):
            right += [row[n - 1 : end - 1].tolist() == ids[n:end] for n, end in spans]
    return sum(right) / len(right)


def _with_answers(
    tokenizer: Tokenizer, reported: str, asked: Sequence[tuple[str, str]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """The ids of a line, and where each answer's begin and end."""
    ids, spans = list(tokenizer.encode(reported)), []
    for question, answer in asked:
        ids += tokenizer.encode_continuation(question)
        start = len(ids)
        ids += tokenizer.encode_continuation(answer)
        spans.append((start, len(ids)))
    return ids, spans
