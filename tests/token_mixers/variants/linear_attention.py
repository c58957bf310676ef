"""Options with which the contract is asked of `LinearAttention`."""

import mlx.core as mx
import mlx.nn as nn


class SignsApart(nn.Module):
    """A feature map that doubles the features."""

    def __call__(self, x: mx.array) -> mx.array:
        return mx.concatenate([mx.maximum(x, 0.0), mx.maximum(-x, 0.0)], axis=-1)


VARIANTS: list[dict[str, object]] = [
    {},
    {"num_heads": 4, "value_head_dim": 5, "bias": True, "feature_map": "relu"},
    {"num_heads": 2, "feature_map": "identity", "normalize": False, "scale": 0.25},
    {"num_heads": 4, "feature_map": SignsApart()},
]
