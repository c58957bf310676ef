"""Arrays whose memory NumPy fills."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np


def host_array(shape: Sequence[int], dtype: mx.Dtype) -> tuple[mx.array, np.ndarray]:
    """A new array, and a NumPy view of its memory to fill before MLX uses the array.

    Not for the gradient of a function that has its own: MLX remembers there how each array was computed,
    and a compiled graph computes it once more, without what NumPy wrote.
    """
    array = mx.zeros(shape, dtype, stream=mx.cpu)
    mx.eval(array)
    return array, np.array(array, copy=False)
