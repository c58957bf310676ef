"""Options with which the contract is asked of `KDA`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"num_heads": 2, "num_value_heads": 4, "value_head_dim": 6, "rank": 3, "lower_bound": -5.0},
]
