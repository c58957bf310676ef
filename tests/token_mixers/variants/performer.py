"""Options with which the contract is asked of `Performer`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"num_heads": 2, "num_features": 37, "bias": True},
    {"num_heads": 4, "kernel": "relu"},
]

# the largest exponent, which has no gradient, cancels but for epsilon
EXACT_GRADIENT = {"eps": 1e-7}
