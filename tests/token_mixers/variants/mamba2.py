"""Options with which the contract is asked of `Mamba2`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {
        "num_heads": 6,
        "head_dim": 5,
        "num_groups": 3,
        "state_dims": 7,
        "max_step": 0.05,
        "bias": True,
    },
]
