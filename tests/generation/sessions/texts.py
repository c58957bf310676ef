"""Shared parts of the tests of sessions: a text, and sessions that hold prefixes of texts."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_mmfree.generation import prefill
from mlx_mmfree.generation.sessions import Sessions
from mlx_mmfree.models import Decoder
from tests.generation.models import VOCABULARY

TEXT = [n * n % VOCABULARY for n in range(17)]


def read(model: Decoder, tokens: list[int], state: Any = None) -> Any:
    return prefill(model, mx.array([tokens]), state)


def keep(sessions: Sessions, model: Decoder, *texts: list[int]) -> None:
    """Reads texts and keeps the states after them."""
    for text in texts:
        sessions.keep(text, read(model, text))


def arrays(state: Any) -> list[mx.array]:
    return [array for _, array in tree_flatten(state)]


def same_bits(got: Any, want: Any) -> bool:
    pairs = zip(arrays(got), arrays(want), strict=True)
    return all(a.dtype == b.dtype and mx.array_equal(a, b).item() for a, b in pairs)
