"""Grouped-query attention."""

from mlx_mmfree.token_mixers import GQA
from tests.goldens.mixers.attention import LINEARS, check_op, rope_of
from tests.goldens.mixers.files import GoldenFile, assert_close, fill, golden


@golden("gqa__op")
def test_gqa_op(file: GoldenFile) -> None:
    kv_heads = file.hyper["kv_heads"]
    check_op(GQA, file, "causal", kv_heads)
    check_op(GQA, file, "full", kv_heads, is_causal=False)
    check_op(GQA, file, "mqa_causal", 1)


@golden("gqa__llama_attention_rope")
def test_attention_with_rope(file: GoldenFile) -> None:
    hyper = file.hyper
    heads = {"num_heads": hyper["heads"], "num_kv_heads": hyper["kv_heads"]}
    mixer = GQA(hyper["hidden"], head_dim=hyper["head_dim"], rope=rope_of(hyper), **heads)
    fill(mixer, file.weights, LINEARS)
    assert_close(mixer(file.inputs["x"])[0], file.out["y"])
