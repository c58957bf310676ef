"""Options with which the contract is asked of `Performer`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"num_heads": 2, "num_features": 37, "bias": True},
    {"num_heads": 4, "kernel": "relu"},
]
