"""Options of DeltaNet and Mamba-2 that golden layers leave out, against their formulas in float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.layers.mixer import TokenMixer
from mlx_mmfree.token_mixers import DeltaNet, Mamba2
from tests.tolerances import TOLERANCE, relative_error

DIMS, LENGTH = 16, 9


def in_float64(mixer: TokenMixer) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A sequence `(L, D)` and the parameters."""
    parameters: Any = tree_flatten(mixer.parameters())
    x = np.array(mx.random.normal((LENGTH, DIMS), key=mx.random.key(1)), np.float64)
    return x, {name: np.array(array, np.float64) for name, array in parameters}


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def convolved(x: np.ndarray, taps: np.ndarray, bias: np.ndarray | float = 0.0) -> np.ndarray:
    size = taps.shape[-1]
    padded = np.concatenate([np.zeros((size - 1, x.shape[1])), x])
    return silu(sum(taps[:, 0, k] * padded[k : k + len(x)] for k in range(size)) + bias)


def normed(x: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def assert_is(mixer: TokenMixer, x: np.ndarray, want: np.ndarray) -> None:
    y, _ = mixer(mx.array(x, mx.float32)[None])
    assert relative_error(y[0], mx.array(want)) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("most", [1.0, 2.0])
def test_twice_as_much_is_replaced_where_it_may_be_negative(most: float) -> None:
    mx.random.seed(2)
    mixer = DeltaNet(DIMS, num_heads=2, allow_negative=most == 2.0)
    x, p = in_float64(mixer)
    q, k, v = (
        convolved(x @ p[f"{name}_proj.weight"].T, p[f"{name}_conv.weight"]).reshape(LENGTH, 2, -1)
        for name in ("query", "key", "value")
    )
    q, k = (y / np.sqrt((y * y).sum(axis=-1, keepdims=True) + 1e-6) for y in (q, k))
    beta = most / (1.0 + np.exp(-(x @ p["beta_proj.weight"].T)))
    state, outputs = np.zeros((2, 8, 8)), []
    for t in range(LENGTH):
        old = np.einsum("hkv,hk->hv", state, k[t])
        state = state + beta[t, :, None, None] * np.einsum("hk,hv->hkv", k[t], v[t] - old)
        outputs.append(np.einsum("hkv,hk->hv", state, q[t]) * 8**-0.5)
    o = normed(np.stack(outputs)) * p["output_norm.weight"]
    assert_is(mixer, x, o.reshape(LENGTH, -1) @ p["output_proj.weight"].T)


def test_all_heads_are_one_group_by_default() -> None:
    specified = Mamba2(DIMS, num_heads=4, state_dims=6, num_groups=1)
    default = Mamba2(DIMS, num_heads=4, state_dims=6)
    assert default.input_proj.weight.shape == specified.input_proj.weight.shape


@pytest.mark.parametrize("groups", [1, 2])
def test_heads_of_a_group_share_what_they_read_by_and_a_norm(groups: int) -> None:
    mx.random.seed(2)
    heads, dims = 4, 6
    mixer = Mamba2(DIMS, num_heads=heads, state_dims=dims, num_groups=groups)
    x, p = in_float64(mixer)
    inner, shared = 2 * DIMS, groups * dims
    z, u, steps = np.split(x @ p["input_proj.weight"].T, [inner, 2 * inner + 2 * shared], axis=-1)
    u = convolved(u, p["short_conv.weight"], p["short_conv.bias"])
    v, b, c = np.split(u, [inner, inner + shared], axis=-1)
    v = v.reshape(LENGTH, heads, -1)
    b, c = (np.repeat(y.reshape(LENGTH, groups, dims), heads // groups, axis=1) for y in (b, c))
    steps = np.log1p(np.exp(steps + p["step_bias"]))
    state, outputs = np.zeros((heads, dims, v.shape[2])), []
    for t in range(LENGTH):
        decay = np.exp(-steps[t] * np.exp(p["decay_log"]))[:, None, None]
        written = np.einsum("hn,hp->hnp", steps[t, :, None] * b[t], v[t])
        state = decay * state + written
        outputs.append(np.einsum("hnp,hn->hp", state, c[t]) + p["skip"][:, None] * v[t])
    gated = np.stack(outputs).reshape(LENGTH, -1) * silu(z)
    o = normed(gated.reshape(LENGTH, groups, -1)).reshape(LENGTH, -1) * p["output_norm.weight"]
    assert_is(mixer, x, o @ p["output_proj.weight"].T)
