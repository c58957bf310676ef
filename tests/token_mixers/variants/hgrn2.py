"""Options with which the contract is asked of `HGRN2`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"num_heads": 2, "head_dim": 5, "scale": 1.0, "bias": True},
]
