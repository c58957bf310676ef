"""Options with which the contract is asked of `Sinkhorn`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"block_size": 4, "num_heads": 4},
    {"block_size": 3, "num_heads": 1, "num_blocks": 3},
]
