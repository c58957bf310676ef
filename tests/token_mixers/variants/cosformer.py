"""Options with which the contract is asked of `CosFormer`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"num_heads": 2, "bias": True},
]
