"""Heads in rotary position embedding and their gradient, against float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import native
from mlx_mmfree.layers.attention.positions import rope_wavelengths
from mlx_mmfree.ops import Rotation, rotated_heads, use_backend
from tests.tolerances import TOLERANCE, relative_error

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
OFFSETS: dict[str, Any] = {
    "number": 5,
    "rows": mx.array([7, 0]),
    "tokens": mx.array([[3, 4, 0, 1, 2], [9, 0, 1, 2, 3]]),
}
HEADS, GROUPS, DIMS = 4, 2, 6


def heads(x: mx.array, offset: Any, is_interleaved: bool) -> list[mx.array]:
    waves = rope_wavelengths(DIMS)
    options = {"num_heads": HEADS, "num_kv_heads": GROUPS, "is_interleaved": is_interleaved}
    rotation = Rotation.of(offset, x.shape[1], waves)
    return list(rotated_heads(x, rotation, **options))


def wanted(x: np.ndarray, offset: Any, is_interleaved: bool) -> list[np.ndarray]:
    """The definition, number by number in float64."""
    batch, length = x.shape[:2]
    tokens = x.astype(np.float64).reshape(batch, length, -1, DIMS).copy()
    positions = np.array(offset)
    if positions.ndim < 2:
        positions = positions.reshape(-1, 1) + np.arange(length)
    positions = np.broadcast_to(positions, (batch, length))
    for i, wave in enumerate(np.array(rope_wavelengths(DIMS), np.float64)):
        first, second = (2 * i, 2 * i + 1) if is_interleaved else (i, i + DIMS // 2)
        angle = (positions / wave)[..., None]
        turned = tokens[:, :, : HEADS + GROUPS]
        a, b = turned[..., first].copy(), turned[..., second].copy()
        turned[..., first] = a * np.cos(angle) - b * np.sin(angle)
        turned[..., second] = a * np.sin(angle) + b * np.cos(angle)
    tokens = tokens.swapaxes(1, 2)
    return np.split(tokens, [HEADS, HEADS + GROUPS], axis=1)


def projected(dtype: mx.Dtype = mx.float32) -> mx.array:
    mx.random.seed(1)
    return mx.random.normal((2, 5, (HEADS + 2 * GROUPS) * DIMS)).astype(dtype)


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_equals_definition(
    backend: str, dtype: mx.Dtype, offset: str, is_interleaved: bool, instructions: str
) -> None:
    x = projected(dtype)
    with use_backend(backend):
        got = heads(x, OFFSETS[offset], is_interleaved)
    want = wanted(np.array(x.astype(mx.float32)), OFFSETS[offset], is_interleaved)
    for own, other in zip(got, want, strict=True):
        assert own.dtype == dtype
        assert relative_error(own, mx.array(other)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("offset", OFFSETS)
def test_gradient_is_finite_differences(offset: str, is_interleaved: bool) -> None:
    x = projected()
    weights = [
        np.random.default_rng(n).normal(size=y.shape) for n, y in enumerate(heads(x, 0, False))
    ]

    def loss(x: mx.array) -> mx.array:
        parts = heads(x, OFFSETS[offset], is_interleaved)
        return sum((y * mx.array(w, mx.float32)).sum() for y, w in zip(parts, weights, strict=True))

    def value(x: np.ndarray) -> float:
        parts = wanted(x, OFFSETS[offset], is_interleaved)
        return sum((y * w).sum() for y, w in zip(parts, weights, strict=True))

    with use_backend("native"):
        gradient = np.array(mx.grad(loss)(x))
    exact = np.array(x, np.float64)
    for at in np.random.default_rng(5).integers(0, x.shape, (40, 3)):
        change = np.zeros(x.shape)
        change[tuple(at)] = 1e-4
        slope = (value(exact + change) - value(exact - change)) / 2e-4
        assert gradient[tuple(at)] == pytest.approx(slope, rel=1e-4, abs=1e-5)


def test_no_gradient_of_one_result_alone() -> None:
    with use_backend("native"):
        gradient = mx.grad(lambda x: heads(x, 3, False)[1].sum())(projected())
    of_keys = gradient.reshape(2, 5, -1, DIMS)[:, :, HEADS : HEADS + GROUPS]
    assert of_keys.any().item()
    assert gradient.abs().sum().item() == pytest.approx(of_keys.abs().sum().item())


def test_threads_do_not_change_bits(threads: int) -> None:
    mx.random.seed(2)
    x = mx.random.normal((3, 300, (HEADS + 2 * GROUPS) * DIMS))
    with use_backend("native"):
        whole, alone = heads(x, 0, False), heads(x[1:2], 0, False)
    assert all(mx.array_equal(a[1:2], b) for a, b in zip(whole, alone, strict=True))


@pytest.mark.usefixtures("unfused")
def test_transforms_and_second_order() -> None:
    x = projected()[None] * mx.array([1.0, 2.0])[:, None, None, None]

    def curvature(x: mx.array) -> mx.array:
        inner = mx.grad(
            lambda x: sum(y.square().sum() * (n + 1) for n, y in enumerate(heads(x, 2, True)))
        )
        return inner(x).square().sum()

    found = []
    for backend in ("native", "reference"):
        with use_backend(backend):
            second = mx.grad(curvature)
            found.append([mx.compile(second)(x[1]), mx.vmap(second)(x)])
    for own, other in zip(*found, strict=True):
        assert relative_error(own, other) <= TOLERANCE[mx.float32]


def test_nothing_and_what_is_refused() -> None:
    assert [y.shape for y in heads(projected()[:, :0], 0, False)] == [
        (2, HEADS, 0, DIMS),
        (2, GROUPS, 0, DIMS),
        (2, GROUPS, 0, DIMS),
    ]
    with pytest.raises(ValueError, match=r"\[rotated_heads\] 'projected' must be \(B, L"):
        heads(projected()[..., 1:], 0, False)
    with pytest.raises(ValueError, match="'num_heads' must be positive but got 0"):
        rotated_heads(projected(), Rotation.of(0, 5, mx.ones(3)), num_heads=0, num_kv_heads=1)
    kernel = native.kernels().rotated_heads
    x, angles = projected(), mx.ones((1, 5, DIMS // 2))
    for arrays, message in [
        ((x[0], angles, angles), "'projected' must be floats"),
        ((x.astype(mx.int32), angles, angles), "'projected' must be floats"),
        ((x, angles[:, :4], angles), "'cosines' and 'sines' must be float32"),
        ((x, angles, mx.concatenate([angles, angles])), "must have the same shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernel(*arrays, HEADS, GROUPS, False)
    with pytest.raises(ValueError, match="must be positive"):
        kernel(x, angles, angles, 0, GROUPS, False)
