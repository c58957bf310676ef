"""Every operation once at the sizes of published models, against float64.

Vocabulary 128,256; inner width 11,008; 8,192 positions; heads of 128 dims.
"""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import ops
from mlx_mmfree.layers.attention.positions import DynamicRoPE, RoPE
from mlx_mmfree.ops import Projection, pack_ternary, use_backend
from tests.tolerances import TOLERANCE

VOCABULARY, INNER, POSITIONS, HEAD = 128_256, 11_008, 8_192, 128
# `None` is the operation's own choice.
BACKENDS = [None, "reference"]


@pytest.fixture(params=BACKENDS, ids=str)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param is None:
        yield
    else:
        with use_backend(request.param):
            yield


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape[-1]).standard_normal(shape, dtype=np.float32)


def trits(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape[-1]).integers(-1, 2, shape)


def error(got: mx.array, want: np.ndarray) -> float:
    """The largest error over the largest reference value, in float64."""
    got = np.array(got.astype(mx.float32), np.float64)
    assert got.shape == want.shape
    return np.abs(got - want).max() / np.abs(want).max()


def normed(x: np.ndarray, weight: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def codes_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = 127 / np.abs(x).max(axis=-1, keepdims=True)
    return np.round(x * scale), scale


@pytest.mark.usefixtures("backend")
def test_codes_of_wide_rows() -> None:
    x, weight = 3 * normal(4, INNER), 1 + 0.1 * normal(INNER)
    codes, scale = ops.rms_norm_quantize(mx.array(x), mx.array(weight), eps=1e-6)
    y = normed(x, weight)
    want, want_scale = codes_of(y)
    assert error(scale, want_scale) < TOLERANCE[mx.float32]
    differs = np.array(codes) != want
    distance = np.abs(np.abs(y * want_scale - np.floor(y * want_scale)) - 0.5)
    assert np.all(distance[differs] < 1e-4)
    assert differs.mean() < 1e-3


@pytest.mark.usefixtures("backend")
def test_norm_of_a_wide_gate() -> None:
    gate, h, weight = normal(3, INNER), 2 * normal(3, INNER)[::-1], 1 + 0.1 * normal(INNER)
    y = ops.gated_rms_norm(mx.array(gate), mx.array(h), mx.array(weight), eps=1e-6)
    assert error(y, normed(gate, weight) * silu(h)) < TOLERANCE[mx.float32]


@pytest.mark.sample(2)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("rows", [1, 48])
def test_product_with_long_rows(rows: int) -> None:
    weight = trits(96, INNER)
    packed = pack_ternary(mx.array(weight))
    # values of one sign make the sums as large as they get
    codes = np.abs(np.round(40 * normal(rows, INNER))).clip(0, 127)
    got = ops.ternary_matmul(mx.array(codes), packed, codes=True)
    assert np.array_equal(np.array(got, np.int64), codes.astype(np.int64) @ weight.T)
    x = normal(rows, INNER)
    got = ops.ternary_matmul(mx.array(x), packed)
    assert error(got, x.astype(np.float64) @ weight.T) < TOLERANCE[mx.float32]
    full = pack_ternary(mx.ones((1, INNER)))
    largest = ops.ternary_matmul(mx.full((rows, INNER), 127.0), full, codes=True)
    assert mx.all(largest == 127 * INNER)


@pytest.mark.usefixtures("backend")
def test_gated_projection_with_long_rows() -> None:
    x, weight, norm = normal(3, 2 * INNER), trits(64, INNER), 1 + 0.1 * normal(INNER)
    residual = normal(3, 64)
    y = ops.bit_linear(
        mx.array(x),
        [Projection(pack_ternary(mx.array(weight)), mx.array([0.02]))],
        gate="silu",
        norm=mx.array(norm),
        norm_eps=1e-5,
        residual=mx.array(residual),
    )
    codes, scale = codes_of(normed(silu(x[:, :INNER]) * x[:, INNER:], norm, 1e-5))
    want = codes @ weight.T * 0.02 / scale + residual
    # a code at a rounding boundary may fall on either side
    assert error(y, want) < 1e-4


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("backend", "bits"),
    [(None, None), (None, 1), (None, 2), (None, 6), ("chunked", None), ("reference", None)],
    ids=str,
    indirect=["backend"],
)
def test_head_of_a_large_vocabulary(backend: None, bits: int | None) -> None:
    """One block of outputs, again and again."""
    times = VOCABULARY // 2_004
    x, block = normal(2, 256), mx.array(normal(2_004, 256)).astype(mx.bfloat16)
    quantization = None
    if bits is not None:
        parts = mx.quantize(block, 64, bits)
        weight, scales, biases = (mx.tile(part, (times, 1)) for part in parts)
        quantization = ops.AffineFormat(scales, biases, 64, bits)
        block = mx.dequantize(parts[0], *(p.astype(mx.float32) for p in parts[1:]), 64, bits)
    else:
        weight = mx.tile(block, (times, 1))
    got = ops.dense_matmul(mx.array(x), weight, quantization)
    want = x.astype(np.float64) @ np.array(block.astype(mx.float32), np.float64).T
    assert error(got, np.tile(want, (1, times))) < TOLERANCE[mx.float32]


@pytest.mark.usefixtures("backend")
def test_dense_product_with_long_rows() -> None:
    x, weight = normal(2, INNER), normal(40, INNER)
    got = ops.dense_matmul(mx.array(x), mx.array(weight))
    assert error(got, x.astype(np.float64) @ weight.T) < TOLERANCE[mx.float32]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("spread", [0.0, 1.0, 20.0])
def test_attention_over_many_positions(spread: float) -> None:
    q, k = spread * normal(1, 2, 4, HEAD), normal(1, 1, POSITIONS, HEAD)
    v = 1 + 0.1 * normal(1, 1, POSITIONS, HEAD)[:, :, ::-1]
    got = ops.attention(*(mx.array(a) for a in (q, k, v)), "causal")
    scores = q.astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(HEAD)
    seen = np.arange(POSITIONS) <= np.arange(POSITIONS - 4, POSITIONS)[:, None]
    want = softmax(np.where(seen, scores, -np.inf)) @ v
    assert error(got, want) < TOLERANCE[mx.float32]


def rotated(x: np.ndarray, positions: np.ndarray, base: float) -> np.ndarray:
    """The published arithmetic: angles are float32 products, nothing else is rounded."""
    wavelengths = base ** (np.arange(0, x.shape[-1], 2) / x.shape[-1])
    per_position = np.float32(1) / wavelengths.astype(np.float32)
    angles = (positions.astype(np.float32)[:, None] * per_position).astype(np.float64)
    a, b = np.split(x.astype(np.float64), 2, axis=-1)
    c, s = np.cos(angles), np.sin(angles)
    return np.concatenate([a * c - b * s, a * s + b * c], axis=-1)


@pytest.mark.usefixtures("backend")
def test_a_step_after_many_positions() -> None:
    heads, groups, capacity = 4, 2, POSITIONS + 1
    projected = normal(1, 1, (heads + 2 * groups) * HEAD)
    keys = normal(1, groups, capacity, HEAD)
    values = normal(1, groups, capacity, HEAD)[:, :, ::-1].copy()
    y, new_keys, _, _ = ops.attention_step(
        mx.array(projected),
        mx.array(keys),
        mx.array(values),
        mx.arange(POSITIONS)[None],
        num_heads=heads,
        wavelengths=RoPE(HEAD, base=5e5).wavelengths,
    )
    parts = projected.reshape(-1, 1, HEAD)
    at = np.array([POSITIONS])
    q, k = rotated(parts[:heads], at, 5e5), rotated(parts[heads : heads + groups], at, 5e5)
    keys, values = keys[0].astype(np.float64), values[0].astype(np.float64)
    keys[:, -1:], values[:, -1:] = k, parts[heads + groups :]
    assert error(new_keys[:, :, -1], k[None, :, 0]) < 2e-6
    scores = q.reshape(groups, -1, HEAD) @ keys.swapaxes(-1, -2) / np.sqrt(HEAD)
    want = (softmax(scores) @ values).reshape(1, 1, -1)
    assert error(y, want) < TOLERANCE[mx.float32]


@pytest.mark.parametrize("base", [1e4, 5e5, 1_000_042.0])
@pytest.mark.parametrize("first", [0, POSITIONS - 4, 131_068])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_rotation_of_far_positions(base: float, first: int, dtype: mx.Dtype) -> None:
    x = mx.array(normal(1, 1, 4, HEAD)).astype(dtype)
    want = rotated(np.array(x.astype(mx.float32)), first + np.arange(4), base)
    for offset in (first, mx.array([first]), first + mx.arange(4)[None]):
        got = RoPE(HEAD, base=base)(x, offset=offset)
        assert error(got, want) < {mx.float32: 1e-6}.get(dtype, TOLERANCE[dtype])


@pytest.mark.usefixtures("backend")
def test_recurrence_over_many_positions() -> None:
    width = 64
    gates = normal(1, POSITIONS, 3 * width)
    # a state that remembers thousands of steps
    gates[..., width : 2 * width] += 6
    weight, bound = 1 + 0.1 * normal(width), sigmoid(normal(width)).astype(np.float32)
    y, last = ops.mlgru_step(
        mx.array(gates),
        mx.zeros((1, width)),
        mx.array(weight),
        eps=1e-6,
        lower_bound=mx.array(bound),
    )
    i, f, g = np.split(gates[0].astype(np.float64), 3, axis=-1)
    f = bound + (1 - bound) * sigmoid(f)
    i = silu(i) * (1 - f)
    states, state = [], np.zeros(width)
    for gate, value in zip(f, i, strict=True):
        state = gate * state + value
        states.append(state)
    assert error(last, state[None]) < TOLERANCE[mx.float32]
    assert error(y, (normed(g, weight) * silu(np.array(states)))[None]) < TOLERANCE[mx.float32]


def test_stretched_rotation_of_far_positions() -> None:
    rope = DynamicRoPE(HEAD, base=1e4, factor=4.0, trained_length=2_048)
    x = normal(1, 1, 2, HEAD)
    positions = POSITIONS - 2 + np.arange(2)
    stretch = 4.0 * (positions + 1) / 2_048 - 3.0
    bases = 1e4 * stretch ** (HEAD / (HEAD - 2))
    want = np.concatenate(
        [_rotated64(x[:, :, [n]], positions[n], bases[n]) for n in range(2)], axis=2
    )
    got = rope(mx.array(x), offset=POSITIONS - 2)
    # an angle of thousands of radians has so many digits in float32
    assert error(got, want) < 4 * POSITIONS * np.finfo(np.float32).eps


def _rotated64(x: np.ndarray, position: int, base: float) -> np.ndarray:
    angles = position / base ** (np.arange(0, HEAD, 2) / HEAD)
    a, b = np.split(x.astype(np.float64), 2, axis=-1)
    c, s = np.cos(angles), np.sin(angles)
    return np.concatenate([a * c - b * s, a * s + b * c], axis=-1)
