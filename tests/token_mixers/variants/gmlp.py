"""Options with which the contract is asked of `GMLP`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"num_heads": 4, "hidden_dims": 48},
    {"attention_dims": 8, "num_heads": 2},
]
