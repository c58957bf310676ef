"""Options with which the contract is asked of `GRU`."""

VARIANTS: list[dict[str, object]] = [{}, {"hidden_dims": 24, "resets_before": True, "bias": False}]
