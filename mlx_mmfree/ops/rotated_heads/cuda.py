"""`rotated_heads` by MLX's own kernels."""

from .metal import run as run
