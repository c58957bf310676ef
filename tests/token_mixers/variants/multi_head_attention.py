"""Options with which the contract is asked of `MultiHeadAttention`."""

from mlx_mmfree.layers import RoPE
from mlx_mmfree.layers.attention.positions import ALiBi

VARIANTS: list[dict[str, object]] = [
    {},
    {"num_heads": 4, "rope": RoPE(8), "bias": True},
    {"num_heads": 2, "head_dim": 8, "position_bias": ALiBi(2)},
]
