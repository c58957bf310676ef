"""Options with which the contract is asked of `GatedDeltaNet`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"num_heads": 2, "num_value_heads": 4, "head_dim": 6, "value_head_dim": 10, "conv_size": 2},
]
