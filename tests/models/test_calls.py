"""Models of every family after `set_dtype`, and with tokens that are none."""

from collections.abc import Callable

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import Decoder
from tests.hub.checkpoints import tiny_model, tiny_transformer
from tests.models.split_models import quantized, ternary_values

MODELS: dict[str, Callable[[], Decoder]] = {
    "hgrn_bit": tiny_model,
    "packed hgrn_bit": lambda: pack_linears(tiny_model()),
    "packed bitnet": lambda: pack_linears(tiny_transformer("bitnet")),
    "ternary llama": lambda: tiny_transformer("llama"),
    "packed llama": lambda: pack_linears(tiny_transformer("llama")),
    "quantized llama": quantized,
    "packed qwen3": lambda: pack_linears(tiny_transformer("qwen3")),
    "qwen3 of ternary values": ternary_values,
    "packed gemma": lambda: pack_linears(tiny_transformer("gemma3_text")),
    "packed minicpm": lambda: pack_linears(tiny_transformer("minicpm", scale_emb=12.0)),
}
TOKENS = mx.array([[1, 5, 9, 2]])


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_set_dtype(name: str, dtype: mx.Dtype) -> None:
    model = MODELS[name]()
    before = dict(tree_flatten(model.parameters()))
    model.set_dtype(dtype)
    logits, state = model(TOKENS)
    logits, _ = model(TOKENS[:, :1], state)
    assert logits.dtype == dtype and mx.isfinite(logits).all().item()
    for key, array in tree_flatten(model.parameters()):
        if key.endswith((".scale", ".input_scale")):
            assert array.dtype == mx.float32 and mx.array_equal(array, before[key])


@pytest.mark.equal_bits
@pytest.mark.parametrize("name", ["packed hgrn_bit", "packed bitnet"])
@pytest.mark.parametrize("bad", [-1, 10**6, 2**31 - 1])
def test_what_follows_from_an_unknown_token_is_nan(name: str, bad: int) -> None:
    model = MODELS[name]()
    logits, _ = model(mx.array([[1, bad, 2], [1, 3, 2]]))
    assert mx.isnan(logits[0, 1:]).all().item() and mx.isfinite(logits[1]).all().item()
    # a batch of the same size, since the number of rows may change the last bits of a dense head
    assert mx.array_equal(logits[1], model(mx.array([[1, 4, 2], [1, 3, 2]]))[0][1])


def test_tokens_of_a_wrong_dtype_or_rank_are_named() -> None:
    model = MODELS["packed hgrn_bit"]()
    with pytest.raises(TypeError, match=r"'tokens' must be integers but got mlx\.core\.float32"):
        model(mx.ones((1, 3)))
    with pytest.raises(ValueError, match=r"two axes .* Add a batch axis"):
        model(mx.array([1, 2]))
