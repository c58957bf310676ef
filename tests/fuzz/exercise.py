"""Loads a damaged checkpoint and judges what happens."""

import random
import time
from pathlib import Path

import mlx.core as mx

from mlx_mmfree.errors import MMFreeError
from mlx_mmfree.hub import load
from tests.fuzz.mutations import mutate

MAX_SECONDS = 20.0
MAX_BYTES = 64_000_000


def exercise(sources: list[Path], target: Path, seed: int) -> tuple[bool, str]:
    """Damages one checkpoint and loads it; anything but a clean error or a sound model raises.

    Returns:
        Whether it loaded, and what was done or the error's message.

    Raises:
        AssertionError: Loading raised something else, or took too long or too much memory.
    """
    _, what = mutate(sources, target, seed)
    rng = random.Random(seed)
    packed, dtype = rng.random() < 0.7, rng.choice((None, mx.float32, mx.bfloat16))
    mx.reset_peak_memory()
    started = time.monotonic()
    try:
        has_loaded, message = _load(target, packed, dtype), what
    except MMFreeError as error:
        has_loaded, message = False, str(error)
        if not message or "\n" in message or len(message) > 2000:
            raise AssertionError(f"{what}: unclear message {message!r:.300}") from error
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    seconds, peak = time.monotonic() - started, mx.get_peak_memory()
    if seconds > MAX_SECONDS or peak > MAX_BYTES:
        raise AssertionError(f"{what}: {seconds:.1f} s and {peak / 1e6:.0f} MB")
    return has_loaded, message


def _load(folder: Path, packed: bool, dtype: mx.Dtype | None) -> bool:
    model, tokenizer = load(folder, packed=packed, dtype=dtype)
    tokens = mx.array([[0, model.vocab_size - 1, tokenizer.vocab_size - 1]])
    logits, state = model(tokens)
    mx.eval(logits, state)
    if logits.shape != (1, 3, model.vocab_size):
        raise AssertionError(f"logits of shape {logits.shape}")
    return True
