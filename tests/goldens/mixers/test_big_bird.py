"""Attention to near, global and random blocks."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_mmfree.token_mixers import BigBird
from tests.goldens.mixers.files import GoldenFile, assert_close, fill, golden


@golden("bigbird__block_sparse")
def test_big_bird(file: GoldenFile) -> None:
    hyper, x, drawn = file.hyper, file.inputs["x"], np.array(file.inputs["rand_attn"])

    def mixer(**options: object) -> BigBird:
        made = BigBird(
            hyper["hidden"],
            block_size=hyper["block_size"],
            num_random=hyper["num_random_blocks"],
            num_heads=hyper["heads"],
            bias=True,
            **options,
        )
        linears = {"query_proj": "query", "key_proj": "key", "value_proj": "value"}
        fill(made, file.weights, linears)
        # the file ends before the output projection
        made.output_proj = nn.Identity()
        return made

    def plan(count: int) -> np.ndarray:
        assert count == hyper["num_blocks"]
        return drawn

    assert_close(mixer(plan=plan)(x)[0], file.out["y_nopad"])
    valid = file.inputs["attention_mask"].astype(mx.bool_)
    assert_close(mixer(plan=plan)(x, None, valid)[0], file.out["y_padded"])
    first = mixer(plan=lambda count: np.zeros_like(drawn))
    assert_close(first(x)[0], file.out["y_eval_mode"])
    released = mixer(plan="released")
    released.eval()
    # with few blocks, a model of transformers would not take this kind of attention
    if hyper["num_blocks"] > 5 + 2 * hyper["num_random_blocks"]:
        assert_close(released(x)[0], file.out["y_eval_mode"])
