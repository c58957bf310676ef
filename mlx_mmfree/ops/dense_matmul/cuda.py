"""`dense_matmul` by MLX's own kernels, in the dtype of the arguments."""

from .metal import run as run
