"""Options with which the contract is asked of `GQA`."""

from mlx_mmfree.layers import DynamicRoPE, RoPE
from mlx_mmfree.layers.attention.positions import ALiBi, RelativeBias
from mlx_mmfree.layers.quantization import Quantization
from mlx_mmfree.token_mixers import AttentionNorms, KeyValueCache

VARIANTS: list[dict[str, object]] = [
    {"num_heads": 4, "rope": RoPE(8)},
    {"num_heads": 4, "num_kv_heads": 1, "head_dim": 16, "norms": AttentionNorms(qk_eps=1e-6)},
    {
        "num_heads": 4,
        "num_kv_heads": 2,
        "norms": AttentionNorms(output_eps=1e-5),
        "rope": RoPE(8),
        "bias": True,
    },
    {"num_heads": 4, "num_kv_heads": 2, "rope": RoPE(8), "cache": KeyValueCache(window=4)},
    {"num_heads": 2, "num_kv_heads": 2, "rope": RoPE(16), "cache": KeyValueCache(window=40)},
    {"num_heads": 4, "num_kv_heads": 2, "rope": RoPE(8), "cache": KeyValueCache(4, sinks=2)},
    {
        "num_heads": 1,
        "rope": RoPE(32),
        "cache": KeyValueCache(4, quantization=Quantization(8, 32)),
    },
    {
        "num_heads": 4,
        "rope": RoPE(8, attention_factor=1.3),
        "norms": AttentionNorms(qk_eps=1e-6),
        "cache": KeyValueCache(4, sinks=2),
    },
    {"num_heads": 4, "rope": DynamicRoPE(8, factor=4.0, trained_length=5)},
    {"num_heads": 4, "position_bias": ALiBi(4), "cache": KeyValueCache(4, sinks=2)},
    {"num_heads": 2, "position_bias": RelativeBias(2, num_buckets=8, max_distance=10)},
]
