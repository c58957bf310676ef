"""Options with which the contract is asked of `MLGRU`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"hidden_dims": 48},
    {"conv_size": 4},
    {"output_gate": "sigmoid"},
    {"conv_size": 3, "share_conv": False},
    {"stacking": "all", "bias": True, "output_gate": "sigmoid"},
    {"stacking": "recurrence", "hidden_dims": 24},
]
