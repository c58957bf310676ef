"""Options with which the contract is asked of `RetNet`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"num_heads": 2, "key_dims": 12, "value_dims": 32, "bias": True},
]
