"""Scales of packed matrices, which stay float32 whatever dtype the model is given."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

SCALES = ("scale", "input_scale")


class Float32Scales(nn.Module):
    """A module whose scales are float32 by construction.

    A cast of the scales that are there, as `set_dtype` makes, leaves them as they are: rounded ones
    would change every output of the matrix. Other values are converted.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        if key in SCALES and isinstance(value, mx.array) and value.dtype != mx.float32:
            held = self.get(key)
            if held is not None and mx.array_equal(held.astype(value.dtype), value):
                return
            value = value.astype(mx.float32)
        super().__setitem__(key, value)
