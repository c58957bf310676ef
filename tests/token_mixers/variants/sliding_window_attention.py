"""Options with which the contract is asked of `SlidingWindowAttention`."""

from mlx_mmfree.layers import RoPE
from mlx_mmfree.layers.attention.positions import ALiBi

VARIANTS: list[dict[str, object]] = [
    {"window": 4, "num_heads": 4, "num_kv_heads": 2, "rope": RoPE(8)},
    {"window": 5, "num_heads": 4, "position_bias": ALiBi(4), "bias": True},
    {},
]
