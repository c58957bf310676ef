"""Tells whether MLX traces gradients on Metal here and now."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx

from . import launch

_assumed: ContextVar[bool | None] = ContextVar("assumed", default=None)

# the least that a fused kernel takes
_HEADS = (1, 1, 16, 64)


@contextmanager
def assume_gradients(are_traced: bool) -> Iterator[None]:
    """Takes gradients for traced inside the `with` block, or for not traced, whatever MLX does."""
    token = _assumed.set(are_traced)
    try:
        yield
    finally:
        _assumed.reset(token)


def traces_gradients() -> bool:
    """Whether MLX traces gradients on Metal.

    MLX has no function that says so, but acts on it: it computes attention by plain operations then,
    a softmax among them, and by one kernel otherwise. The smallest attention shows which.
    """
    if (assumed := _assumed.get()) is not None:
        return assumed
    if launch.is_recording() or not mx.metal.is_available():
        return False
    x = mx.zeros(_HEADS)
    graph = io.StringIO()
    mx.export_to_dot(graph, mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0))
    return "Softmax" in graph.getvalue()
