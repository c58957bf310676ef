"""Linear attention, normalised with elu + 1 and as plain fast weights."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.token_mixers import LinearAttention
from tests.goldens.mixers.files import GoldenFile, assert_close, golden
from tests.goldens.mixers.passing import apart, passing, side_by_side


def bare(q: mx.array, v: mx.array, **options: Any) -> LinearAttention:
    """One whose projections pass on the queries, keys and values `(B, T, H, N)` of its input."""
    heads, keys, values = q.shape[2], q.shape[3], v.shape[3]
    widths = {"query_proj": heads * keys, "key_proj": heads * keys, "value_proj": heads * values}
    sizes = {"num_heads": heads, "head_dim": keys, "value_head_dim": values}
    mixer = LinearAttention(sum(widths.values()), **sizes, **options)
    return passing(mixer, widths, widths["value_proj"])


@golden("linear_attention__elu1")
@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_elu_causal(file: GoldenFile, cut: int) -> None:
    """Read token by token, in chunks and whole."""
    q, k, v = (file.inputs[name] for name in ("q", "k_causal", "v_causal"))
    mixer = bare(q, v, eps=file.hyper["eps"])
    x, state, parts = side_by_side(q, k, v), None, []
    for start in range(0, x.shape[1], cut):
        y, state = mixer(x[:, start : start + cut], state)
        parts.append(y)
    y = mx.concatenate(parts, axis=1)
    for name in ("causal_recurrent", "causal_parallel_f32"):
        assert_close(apart(y, v.shape), file.out[name])
    assert_close(state.fast_weights[..., :-1], file.out["state_S"])
    assert_close(state.fast_weights[..., -1], file.out["state_z"])


@golden("linear_attention__elu1")
def test_elu_of_all(file: GoldenFile) -> None:
    q, k, v = (file.inputs[name] for name in "qkv")
    mixer = bare(q, v, eps=file.hyper["eps"], is_causal=False)
    none = [mx.zeros((*q.shape[:2], *x.shape[2:])) for x in (k, v)]
    x, memory = side_by_side(q, *none), side_by_side(mx.zeros((*k.shape[:2], *q.shape[2:])), k, v)
    shape = (*q.shape[:3], v.shape[3])
    assert_close(apart(mixer(x, memory=memory)[0], shape), file.out["noncausal"])
    valid = mx.arange(k.shape[1]) < file.inputs["key_lengths"][:, None]
    y, _ = mixer(x, memory=memory, memory_valid=valid)
    assert_close(apart(y, shape), file.out["noncausal_padded"])


@golden("linear_attention__identity_unnormalised")
@pytest.mark.parametrize("normalize", [False, True])
def test_fast_weights(file: GoldenFile, normalize: bool) -> None:
    q, k, v = (file.inputs[name] for name in "qkv")
    options = {"feature_map": "identity", "scale": q.shape[-1] ** -0.5, "eps": 1e-10}
    y, state = bare(q, v, normalize=normalize, **options)(side_by_side(q, k, v))
    assert_close(apart(y, v.shape), file.out["o_normalised" if normalize else "o"])
    weights = state.fast_weights
    if normalize:
        assert_close(weights[..., -1], file.out["z"].squeeze(1))
        weights = weights[..., :-1]
    assert_close(weights, file.out["state"])
