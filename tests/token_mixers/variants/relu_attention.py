"""Options with which the contract is asked of `ReLUAttention`."""

from mlx_mmfree.layers import RoPE
from mlx_mmfree.layers.attention.positions import ALiBi
from mlx_mmfree.token_mixers import KeyValueCache

VARIANTS: list[dict[str, object]] = [
    {},
    {"normalization": "gated_norm", "num_heads": 4, "rope": RoPE(8)},
    {"normalization": "none", "power": 2, "num_heads": 4, "num_kv_heads": 2, "bias": True},
    {"num_heads": 2, "position_bias": ALiBi(2), "cache": KeyValueCache(window=4)},
]

# the norm of a result that is almost 0 jumps where the first weight becomes positive
EXACT_GRADIENT = {"norm_eps": 1.0}
