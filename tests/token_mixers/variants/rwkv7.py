"""Options with which the contract is asked of `RWKV7`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"num_heads": 2, "decay_rank": 3, "removal_rank": 5, "gate_rank": 2, "bias": True},
]
