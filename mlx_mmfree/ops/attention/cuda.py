"""`attention` by MLX's fused kernels, in the dtype of the arguments. It has not been run on a GPU."""

from .fused import run as run
