"""Options with which the contract is asked of `Hydra`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"bias": True},
]
