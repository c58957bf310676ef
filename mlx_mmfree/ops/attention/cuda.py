"""`attention` by MLX's fused kernels, in the dtype of the arguments."""

from .fused import run as run
