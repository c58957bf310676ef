"""Longformer against attention with a dense mask: blocks, global tokens and padding."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.layers.attention import key_values as sequence_blocks
from mlx_mmfree.token_mixers import Longformer
from tests.tolerances import TOLERANCE, relative_error

DIMS, HEADS, LENGTH, WINDOW = 16, 2, 43, 4


def _softmax_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    q, k, v = (x.astype(np.float64).reshape(len(x), HEADS, -1).swapaxes(0, 1) for x in (q, k, v))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(DIMS // HEADS)
    weights = np.exp(np.where(seen, scores, -np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ v).swapaxes(0, 1).reshape(-1, DIMS)


def _dense(mixer: Longformer, x: mx.array, is_global: np.ndarray) -> mx.array:
    """One sequence without padding, `(L, D)`."""
    made = {
        name: np.array(mixer[f"{name}_proj"](x))
        for side in ("", "global_")
        for name in (f"{side}query", f"{side}key", f"{side}value")
    }
    position = np.arange(len(is_global))
    near = np.abs(position[:, None] - position) < WINDOW
    y = _softmax_attention(made["query"], made["key"], made["value"], near | is_global)
    everything = np.ones_like(near)
    of_all = _softmax_attention(
        made["global_query"], made["global_key"], made["global_value"], everything
    )
    return mixer.output_proj(mx.array(np.where(is_global[:, None], of_all, y).astype(np.float32)))


@pytest.mark.parametrize("size", [5, 64])
@pytest.mark.parametrize("is_padded", [False, True])
def test_equals_dense_attention(
    is_padded: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_blocks, "SMALLEST", size)
    mx.random.seed(0)
    mixer = Longformer(DIMS, window=WINDOW, num_heads=HEADS, bias=True)
    x, rng = mx.random.normal((3, LENGTH, DIMS)), np.random.default_rng(1)
    is_global = rng.random((3, LENGTH)) < [[0.0], [0.1], [0.3]]
    valid = rng.random((3, LENGTH)) < (0.8 if is_padded else 2.0)
    y, state = mixer(x, None, mx.array(valid) if is_padded else None, is_global=mx.array(is_global))
    assert state == ()
    first, _ = mixer(x, None, mx.array(valid) if is_padded else None)
    for row in range(3):
        real = np.flatnonzero(valid[row])
        own = mx.array(real)
        want = _dense(mixer, x[row, own], is_global[row, real])
        assert relative_error(y[row, own], want) <= TOLERANCE[mx.float32]
        # without a mask the first token is global
        want = _dense(mixer, x[row, own], np.arange(len(real)) < 1)
        assert relative_error(first[row, own], want) <= TOLERANCE[mx.float32]
    assert not mx.where(mx.array(valid)[..., None], 0.0, y).any().item()


def test_a_row_of_padding_alone_has_a_gradient() -> None:
    mixer = Longformer(DIMS, window=WINDOW, num_heads=HEADS)
    x = mx.random.normal((2, 9, DIMS))
    valid = mx.array([[False] * 9, [True] * 9])
    gradient = mx.grad(lambda x: (mixer(x, None, valid)[0] ** 2).sum())(x)
    assert mx.isfinite(gradient).all().item() and not gradient[0].any().item()


def test_a_mask_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"'is_global' must have shape \(2, 5\)"):
        Longformer(DIMS)(mx.zeros((2, 5, DIMS)), is_global=mx.zeros((5,), mx.bool_))
