"""Options with which the contract is asked of `GLA`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"num_heads": 2, "key_dims": 32, "value_dims": 48, "gate_root": 1.0, "gate_rank": 3},
]
