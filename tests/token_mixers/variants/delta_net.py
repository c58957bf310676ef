"""Options with which the contract is asked of `DeltaNet`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"num_heads": 2, "key_dims": 24, "value_dims": 48, "use_gate": True, "allow_negative": True},
]
