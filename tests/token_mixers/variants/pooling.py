"""Options with which the contract is asked of `Pooling`."""

VARIANTS: list[dict[str, object]] = [{}, {"window": 4}, {"window": 40}]
