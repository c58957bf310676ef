"""Options with which the contract is asked of `LocalAttention`."""

from mlx_mmfree.layers import RoPE
from mlx_mmfree.layers.attention.positions import ALiBi

VARIANTS: list[dict[str, object]] = [
    {},
    {"block_size": 4, "num_heads": 4, "num_kv_heads": 2, "rope": RoPE(8)},
    {"block_size": 3, "neighbours": 0, "num_heads": 4, "position_bias": ALiBi(4)},
]
