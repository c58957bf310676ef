"""Options with which the contract is asked of `HGRN`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"hidden_dims": 48, "bias": True},
]
