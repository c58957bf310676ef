"""Options with which the contract is asked of `RingAttention` in one process."""

from mlx_mmfree.layers import RoPE

VARIANTS: list[dict[str, object]] = [{}, {"num_heads": 4, "num_kv_heads": 2, "rope": RoPE(8)}]
