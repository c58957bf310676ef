"""Grouped-query attention, plain and with an output gate."""

import mlx.core as mx
import pytest
from mlx.utils import tree_unflatten

from mlx_mmfree.layers import RoPE
from mlx_mmfree.token_mixers import GQA, AttentionNorms
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


def gated(file: GoldenFile) -> GQA:
    hyper = file.hyper
    return GQA(
        hyper["hidden"],
        num_heads=hyper["heads"],
        num_kv_heads=hyper["kv_heads"],
        head_dim=hyper["head_dim"],
        is_gated=True,
        rope=RoPE(hyper["rotary_dim"], base=hyper["rope_base"]),
        norms=AttentionNorms(1e-6),
    )


def parameters_of(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Parameters of the mixer, whose norms have the whole gain."""
    found = {f"{ours}.weight": weights[f"{theirs}.weight"] for ours, theirs in LINEARS.items()}
    for name in ("query", "key"):
        found[f"{name}_norm.weight"] = 1.0 + weights[f"{name[0]}_norm.weight"]
    return found


@golden("gated_attention__qwen35")
@pytest.mark.parametrize("cuts", [(), (4,), (1, 2, 3)], ids=["whole", "chunks", "tokens"])
def test_gated_attention(file: GoldenFile, cuts: tuple[int, ...]) -> None:
    mixer, state, parts = gated(file), None, []
    mixer.load_weights(list(parameters_of(file.weights).items()))
    for chunk in mx.split(file.inputs["x"], list(cuts), axis=1):
        y, state = mixer(chunk, state)
        parts.append(y)
    assert_close(mx.concatenate(parts, axis=1), file.out["y"])


@golden("gated_attention__qwen35")
def test_gradients_of_gated_attention(file: GoldenFile) -> None:
    mixer = gated(file)

    def loss(weights: dict[str, mx.array], x: mx.array) -> mx.array:
        mixer.update(tree_unflatten(list(parameters_of(weights).items())))
        return (mixer(x)[0] * file.inputs["dy"]).sum()

    gradients, of_input = mx.grad(loss, argnums=(0, 1))(file.weights, file.inputs["x"])
    assert_close(of_input, file.out["dx"])
    for name, gradient in gradients.items():
        assert_close(gradient, file.out[f"dw.{name}"])
