"""The key of MLX's global generator as an array, which may depend on a compiled step's arguments."""

from typing import Any, cast

import mlx.core as mx


def random_key() -> mx.array:
    """The key from which the next numbers are drawn."""
    # the generator writes to its own array
    return mx.stop_gradient(cast(Any, mx.random.state)[0])


def set_random_key(key: mx.array) -> None:
    """Makes the generator draw its next numbers from a key."""
    cast(Any, mx.random.state)[0][:] = key
