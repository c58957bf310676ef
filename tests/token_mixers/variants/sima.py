"""Options with which the contract is asked of `SimA`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"num_heads": 2, "class_only": True, "bias": True},
]
