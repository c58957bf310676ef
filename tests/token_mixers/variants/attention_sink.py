"""Options with which the contract is asked of `AttentionSink`."""

from mlx_mmfree.layers import RoPE
from mlx_mmfree.layers.attention.positions import ALiBi

VARIANTS: list[dict[str, object]] = [
    {},
    {"window": 4, "sinks": 2, "num_heads": 4, "rope": RoPE(8)},
    {"window": None, "sinks": 0, "is_learned": True, "num_heads": 4, "num_kv_heads": 2},
    {"window": 4, "sinks": 0, "is_learned": True, "num_heads": 4, "rope": RoPE(8)},
    {"window": 3, "sinks": 1, "is_learned": True, "num_heads": 2, "position_bias": ALiBi(2)},
]
