"""Options with which the contract is asked of `Reformer`: within a chunk, where all is seen."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"convention": "transformers", "num_heads": 4, "num_rounds": 2},
    {"convention": "reformer_pytorch", "num_heads": 2, "num_rounds": 1, "num_buckets": 6},
]

# beyond a chunk, what is near follows from all tokens of a call
EXACT_UP_TO = 64
