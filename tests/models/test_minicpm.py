"""MiniCPM beside a computation of its own equations in float64, where each of its constants counts."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.layers.matrix import parameters
from mlx_mmfree.models import Decoder
from tests.hub.checkpoints import TOKENS, tiny_transformer
from tests.tolerances import TOLERANCE, relative_error

LAYERS, HEADS, KEY_HEADS, HEAD_DIM, DIMS = 3, 4, 2, 6, 24
# the mean squares of the stream lie about the epsilon
CONSTANTS = {"scale_emb": 3.0, "scale_depth": 0.7, "dim_model_base": 8.0, "rms_norm_eps": 0.5}


def model_with(**changes: float) -> Decoder:
    options: dict[str, Any] = {**CONSTANTS, **changes, "num_hidden_layers": LAYERS, "linears": None}
    return tiny_transformer("minicpm", **options)


def normed(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONSTANTS["rms_norm_eps"]) * gain


def rotated(x: np.ndarray) -> np.ndarray:
    """The halves of each head's dims `(H, L, K)` against each other."""
    half = HEAD_DIM // 2
    angles = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    counts = {"query": HEADS, "key": KEY_HEADS, "value": KEY_HEADS}
    q, k, v = (
        (x @ weights[f"token_mixer.{name}_proj.weight"].T)
        .reshape(len(x), count, HEAD_DIM)
        .swapaxes(0, 1)
        for name, count in counts.items()
    )
    k, v = (np.repeat(part, HEADS // KEY_HEADS, axis=0) for part in (rotated(k), v))
    scores = rotated(q) @ k.swapaxes(1, 2) / np.sqrt(HEAD_DIM)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    y = shares / shares.sum(-1, keepdims=True) @ v
    return y.swapaxes(0, 1).reshape(len(x), -1) @ weights["token_mixer.output_proj.weight"].T


def feed_forward(x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    gate, up, down = (
        weights[f"channel_mixer.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    gated = x @ gate.T
    return (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T


def expected(model: Decoder) -> mx.array:
    """The equations of the papers, in which nothing is folded into another constant."""
    arrays = {name: np.array(array, np.float64) for name, array in parameters(model).items()}
    h = arrays["embed.weight"][np.array(TOKENS[0])] * CONSTANTS["scale_emb"]
    share = CONSTANTS["scale_depth"] / np.sqrt(LAYERS)
    for layer in range(LAYERS):
        mark = f"blocks.{layer}."
        own = {name.removeprefix(mark): x for name, x in arrays.items() if name.startswith(mark)}
        h = h + share * attention(normed(h, own["token_norm.weight"]), own)
        h = h + share * feed_forward(normed(h, own["channel_norm.weight"]), own)
    h = normed(h, arrays["norm.weight"]) * CONSTANTS["dim_model_base"] / DIMS
    return mx.array(h @ arrays["head.weight"].T)[None]


def test_equals_the_equations() -> None:
    model = model_with()
    assert relative_error(model(TOKENS)[0], expected(model)) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("name", CONSTANTS)
def test_each_constant_counts(name: str) -> None:
    """One that is a hundredth larger changes the logits by far more than rounding."""
    model = model_with(**{name: 1.01 * CONSTANTS[name]})
    assert relative_error(model(TOKENS)[0], expected(model)) > 50 * TOLERANCE[mx.float32]
