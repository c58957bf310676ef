"""Options with which the contract is asked of `Synthesizer`."""

VARIANTS: list[dict[str, object]] = [
    {},
    {"scores": "random", "num_heads": 4, "value_head_dim": 6, "bias": True},
    {"scores": "random", "num_heads": 2, "has_products": True},
    {"scores": "factorized_random", "num_heads": 2},
    {"scores": "factorized_dense", "num_heads": 2},
    {"scores": "factorized_dense", "tiling": "each", "score_dims": 4},
]
