"""Mixers of maps of 224 x 224 positions against float64: sums over all positions lose nothing."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mmfree.layers.mixer import SpatialMixer
from mlx_mmfree.spatial_mixers import (
    AdditiveAttention,
    CrossCovarianceAttention,
    MultiScaleAttention,
    SpatialPooling,
)
from tests.tolerances import TOLERANCE, relative_error

SIDE, DIMS = 224, 16
Numbers = np.ndarray


def array64(x: mx.array) -> Numbers:
    return np.array(x, np.float64)


def linear(layer: nn.Module, x: Numbers) -> Numbers:
    y = x @ array64(layer.weight).T
    return y + array64(layer.bias) if "bias" in layer else y


def unit(x: Numbers, axis: int) -> Numbers:
    return x / np.linalg.norm(x, axis=axis, keepdims=True)


def additive(mixer: nn.Module, x: Numbers) -> Numbers:
    x = x.reshape(-1, DIMS)
    q, k = (unit(linear(mixer[name], x), -1) for name in ("query_proj", "key_proj"))
    weights = unit(q @ array64(mixer.query_weight), 0)
    whole = (weights * q).sum(axis=0)
    return linear(mixer.output_proj, linear(mixer.inner_proj, whole * k) + q)


def cross_covariance(mixer: nn.Module, x: Numbers) -> Numbers:
    q, k, v = np.split(linear(mixer.qkv_proj, x.reshape(-1, DIMS)), 3, axis=-1)
    parts = []
    for head in np.split(np.arange(DIMS), mixer.num_heads):
        scores = unit(q[:, head], 0).T @ unit(k[:, head], 0)
        weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
        parts.append(v[:, head] @ weights.T)
    return linear(mixer.output_proj, np.concatenate(parts, axis=-1))


def rectified(mixer: nn.Module, x: Numbers) -> Numbers:
    heads = np.split(linear(mixer.qkv_proj, x.reshape(-1, DIMS)), 2, axis=-1)
    parts = []
    for head in heads:
        q, k, v = np.split(head, 3, axis=-1)
        q, k = np.maximum(q, 0), np.maximum(k, 0)
        parts.append(q @ (k.T @ v) / (q @ k.sum(axis=0) + 1e-5)[:, None])
    y = linear(mixer.output_proj, np.concatenate(parts, axis=-1))
    return y / np.sqrt(1 + 1e-5)


def pooled(mixer: nn.Module, x: Numbers) -> Numbers:
    padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    inside = np.pad(np.ones((SIDE, SIDE, 1)), ((1, 1), (1, 1), (0, 0)))
    total, count = (
        sum(
            each[row : row + SIDE, column : column + SIDE]
            for row in range(3)
            for column in range(3)
        )
        for each in (padded, inside)
    )
    return total / count - x


CASES: dict[str, tuple[Callable[[], SpatialMixer], Callable[[nn.Module, Numbers], Numbers]]] = {
    "additive": (lambda: AdditiveAttention(DIMS), additive),
    "cross covariance": (
        lambda: CrossCovarianceAttention(DIMS, num_heads=2, is_stacked=True),
        cross_covariance,
    ),
    "rectified": (lambda: MultiScaleAttention(DIMS, head_dim=8, scales=()), rectified),
    "pooled": (lambda: SpatialPooling(DIMS), pooled),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_a_large_map(name: str) -> None:
    mx.random.seed(0)
    make, reference = CASES[name]
    mixer = make().eval()
    # a mean, so that sums grow with the positions
    x = np.random.default_rng(0).normal(0.5, 1.0, (SIDE, SIDE, DIMS)).astype(np.float32)
    want = reference(mixer, x.astype(np.float64)).reshape(1, SIDE, SIDE, DIMS)
    got = mixer(mx.array(x[None]))
    assert relative_error(got, mx.array(want.astype(np.float32))) < TOLERANCE[mx.float32]
