"""The dtypes of floats that weights and activations may have."""

import mlx.core as mx

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
