"""`attention_step` on Metal: the operations that it is made of, with MLX's kernel of attention."""

from typing import Any

from ..backend import launch
from .reference import run as run


def unsupported(*args: Any, **kwargs: Any) -> str | None:
    return launch.unavailable()
