"""Shared parts of the classes of checkpoints: damaged copies of a source, and loading them."""

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from mlx_mmfree.hub import load

Mutation = Callable[[Path, random.Random], str]


def damaged_copy(
    mutations: Sequence[Mutation], sources: Path, target: Path, rng: random.Random
) -> str:
    """Copies one of the sources and damages it; says how."""
    source = rng.choice(sorted(sources.iterdir()))
    shutil.copytree(source, target)
    mutation = rng.choice(mutations)
    return f"{mutation.__name__} in {source.name}: {mutation(target, rng)}"


def load_and_run(folder: Path, rng: random.Random) -> None:
    """Loads a checkpoint in one of the ways there are and computes logits."""
    packed, dtype = rng.random() < 0.7, rng.choice((None, mx.float32, mx.bfloat16))
    model, tokenizer = load(folder, packed=packed, dtype=dtype)
    tokens = mx.array([[0, model.vocab_size - 1, tokenizer.vocab_size - 1]])
    logits, state = model(tokens)
    mx.eval(logits, state)
    if logits.shape != (1, 3, model.vocab_size):
        raise AssertionError(f"logits of shape {logits.shape}")
