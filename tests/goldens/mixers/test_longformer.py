"""A window on both sides with global tokens."""

import mlx.nn as nn

from mlx_mmfree.token_mixers import Longformer
from tests.goldens.mixers.files import GoldenFile, assert_close, fill, golden

LINEARS = {
    "query_proj": "query",
    "key_proj": "key",
    "value_proj": "value",
    "global_query_proj": "query_global",
    "global_key_proj": "key_global",
    "global_value_proj": "value_global",
}


@golden("sliding_window__longformer")
def test_longformer(file: GoldenFile) -> None:
    hyper = file.hyper
    mixer = Longformer(
        hyper["hidden"],
        window=hyper["one_sided"] + 1,
        num_global=0,
        num_heads=hyper["heads"],
        bias=True,
    )
    fill(mixer, file.weights, LINEARS)
    # the file ends before the output projection
    mixer.output_proj = nn.Identity()
    x = file.inputs["x"]
    assert_close(mixer(x)[0], file.out["local"])
    assert_close(mixer(x, is_global=file.inputs["global_mask"])[0], file.out["global"])
