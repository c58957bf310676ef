"""Keeps what the backward pass computes again out of compiled graphs.

In graphs that MLX compiles, functions with a gradient of their own that compute themselves again have
lost gradients: adapters of packed matrices got none, where the CPU kernels were not built.
"""

from ..ops.backend.compilation import is_tracing


class RecomputingError(Exception):
    """A graph cannot be compiled, since its backward pass computes parts of it again."""


def check_not_traced() -> None:
    """Raises `RecomputingError` while a graph is traced to be compiled."""
    if is_tracing():
        raise RecomputingError
