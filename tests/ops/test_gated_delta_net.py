"""The work of a gated delta net before and after its recurrence, against its formula in float64."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.ops import use_backend
from mlx_mmfree.ops.gated_delta_net import HeadSizes, delta_rule_inputs, delta_rule_output
from tests.emulator.emulator import Emulator
from tests.ops.planting import Fault, assert_seen
from tests.tolerances import TOLERANCE, relative_error

# heads that share keys and such that do not, dims that fill lanes or not
SIZES = [HeadSizes(2, 6, 40, 24, 1), HeadSizes(3, 3, 32, 128, 2)]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def arguments(sizes: HeadSizes, length: int, taps: int, dtype: mx.Dtype) -> list[mx.array]:
    """Both arrays of projections have columns that do not count."""
    mx.random.seed(length)
    channels, heads = sizes.channels, sizes.heads
    given = [
        mx.random.normal((2, length, channels + 5)),
        # steps whose exponentials overflow, and such that vanish beside 1
        60.0 * mx.random.normal((2, length, 2 * heads + 3)),
        mx.random.normal((channels, 1, taps)),
        mx.random.normal((2, taps - 1, channels)),
    ]
    others = [mx.random.uniform(-3, 2, (heads,)), mx.random.normal((heads,))]
    return [*(x.astype(dtype) for x in given), *others]


def inputs_by_formula(arrays: list[mx.array], sizes: HeadSizes) -> list[np.ndarray]:
    qkv, steps, taps, state, decay_log, step_bias = (
        np.array(x.astype(mx.float32), np.float64) for x in arrays
    )
    key_heads, heads, keys, values, max_beta = sizes
    length, count = qkv.shape[1], taps.shape[-1]
    window = np.concatenate([state, qkv[..., : sizes.channels]], axis=1)
    z = sum(taps[:, 0, t] * window[:, t : t + length] for t in range(count))
    z = z * sigmoid(z)
    width = key_heads * keys
    parts = np.split(z, [width, 2 * width], axis=-1)
    q, k, v = (
        part.reshape(2, length, -1, dims).swapaxes(1, 2)
        for part, dims in zip(parts, (keys, keys, values), strict=True)
    )
    q, k = (x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat(heads // key_heads, axis=1) for x in (q / np.sqrt(keys), k))
    b, a = (steps[..., -n : steps.shape[2] - n + heads] for n in (2 * heads, heads))
    beta = max_beta * sigmoid(b).swapaxes(1, 2)[..., None]
    f = np.exp(-np.exp(decay_log) * np.logaddexp(0, a + step_bias)).swapaxes(1, 2)[..., None]
    return [q, beta * k, v, f * k, f, window[:, length:]]


def check_inputs(sizes: HeadSizes, length: int, taps: int, dtype: mx.Dtype) -> None:
    arrays = arguments(sizes, length, taps, dtype)
    found = delta_rule_inputs(*arrays, sizes)
    for got, want in zip(found, inputs_by_formula(arrays, sizes), strict=True):
        assert got.shape == want.shape
        assert relative_error(got, mx.array(want)) <= TOLERANCE[dtype]
    assert found[-1].dtype == dtype


def check_output(dims: int, length: int, first: int, dtype: mx.Dtype) -> None:
    mx.random.seed(dims)
    o = mx.random.normal((2, 9, length, dims))
    gate = mx.random.normal((2, length, first + 9 * dims + 2)).astype(dtype)
    weight = mx.random.normal((dims,))
    got = delta_rule_output(o, gate, weight, eps=1e-6, first=first)
    read, g, w = (np.array(x.astype(mx.float32), np.float64) for x in (o, gate, weight))
    read = read.swapaxes(1, 2)
    g = g[..., first : first + 9 * dims].reshape(read.shape)
    normed = read / np.sqrt((read**2).mean(axis=-1, keepdims=True) + 1e-6) * w
    want = (normed * g * sigmoid(g)).reshape(2, length, -1)
    assert got.dtype == dtype
    assert relative_error(got, mx.array(want)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("length", "taps"), [(1, 4), (2, 4), (9, 2), (1, 1)])
@pytest.mark.parametrize("sizes", SIZES)
def test_inputs(sizes: HeadSizes, length: int, taps: int, dtype: mx.Dtype) -> None:
    check_inputs(sizes, length, taps, dtype)


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("length", "taps"), [(1, 4), (2, 4), (9, 2)])
@pytest.mark.parametrize("sizes", SIZES)
def test_inputs_on_metal(
    metal: None, sizes: HeadSizes, length: int, taps: int, dtype: mx.Dtype
) -> None:
    with use_backend("metal"):
        check_inputs(sizes, length, taps, dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("dims", "length", "first"), [(24, 1, 0), (128, 3, 5)])
def test_output(dims: int, length: int, first: int, dtype: mx.Dtype) -> None:
    check_output(dims, length, first, dtype)


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("dims", "length", "first"), [(24, 1, 0), (128, 3, 5)])
def test_output_on_metal(metal: None, dims: int, length: int, first: int, dtype: mx.Dtype) -> None:
    with use_backend("metal"):
        check_output(dims, length, first, dtype)


@pytest.mark.metal
def test_gradients_on_metal(metal: None) -> None:
    sizes = SIZES[0]
    arrays = arguments(sizes, 3, 4, mx.float32)
    o, weight = mx.random.normal((2, 6, 3, 24)), mx.random.normal((24,))

    def loss(*arrays: mx.array) -> mx.array:
        *parts, _ = delta_rule_inputs(*arrays, sizes)
        gate = arrays[0][..., : 6 * 24]
        y = delta_rule_output(o, gate, weight, eps=1e-6)
        return (
            sum((part * mx.cos(mx.arange(part.size)).reshape(part.shape)).sum() for part in parts)
            + (y * y).sum()
        )

    which = list(range(6))
    with use_backend("metal"):
        got = mx.grad(loss, argnums=which)(*arrays)
    with use_backend("reference"):
        want = mx.grad(loss, argnums=which)(*arrays)
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) <= 1e-5


@pytest.mark.parametrize("argument", range(6))
def test_shapes_of_inputs_that_do_not_fit(argument: int) -> None:
    arrays = arguments(SIZES[0], 3, 4, mx.float32)
    arrays[argument] = arrays[argument][..., :-7] if argument < 2 else arrays[argument][1:]
    with pytest.raises(ValueError, match=r"^\[delta_rule_inputs\] '"):
        delta_rule_inputs(*arrays, SIZES[0])


def test_shapes_of_an_output_that_do_not_fit() -> None:
    o, gate = mx.zeros((1, 2, 3, 4)), mx.zeros((1, 3, 8))
    with pytest.raises(ValueError, match=r"^\[delta_rule_output\] 'o', 'gate' and 'weight'"):
        delta_rule_output(o, gate, mx.ones(3), eps=1e-6)
    with pytest.raises(ValueError, match=r"^\[delta_rule_output\] 'gate' must have 8 columns"):
        delta_rule_output(o, gate, mx.ones(4), eps=1e-6, first=1)


def inputs() -> None:
    with use_backend("metal"):
        check_inputs(SIZES[0], 3, 4, mx.float32)


def output() -> None:
    with use_backend("metal"):
        check_output(24, 3, 5, mx.float32)


KERNELS = {inputs: "delta_rule_inputs", output: "delta_rule_output"}
FAULTS = {
    "inputs: taps the wrong way": Fault(
        inputs, "channel * TAPS + tap", "channel * TAPS + TAPS - 1 - tap", 0
    ),
    "inputs: state of another row": Fault(inputs, "(row * (TAPS - 1) + before", "(before", 0),
    "inputs: last inputs of another position": Fault(
        inputs, "position == length - 1 &&", "position == 0 &&", 0
    ),
    "inputs: heads tiled": Fault(
        inputs, "row * HEADS + shared", "row * HEADS + HEADS - 1 - shared", 0
    ),
    "inputs: query not scaled": Fault(inputs, "kind == 0 ? precise", "kind == 3 ? precise", 0),
    "inputs: no unit length": Fault(inputs, "squares = simd_sum(squares)", "", 0),
    "inputs: beta and step exchanged": Fault(inputs, "steps[end]", "steps[end + HEADS]", 0),
    "inputs: no bias": Fault(inputs, "+ static_cast<float>(step_bias[shared])", "", 0),
    "inputs: softplus overflows": Fault(inputs, "-abs(step)", "step", 0),
    "inputs: half of beta": Fault(inputs, "MAX_BETA * sigmoid", "0.5f * sigmoid", 0),
    "inputs: rows of projections": Fault(inputs, "* qkv_shape[2]", "* CHANNELS", 0),
    "output: gate of another column": Fault(output, "+ FIRST", "", 0),
    "output: heads before positions": Fault(
        output,
        "row * heads + head) * length + position",
        "row * length + position) * heads + head",
        0,
    ),
    "output: no norm": Fault(output, "simd_sum(squares)", "squares", 0),
    "output: sigmoid alone": Fault(output, "value * sigmoid", "sigmoid", 0),
}


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_metal_are_seen(
    name: str, emulated: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    assert_seen(fault, KERNELS[fault.check], emulated, monkeypatch)
