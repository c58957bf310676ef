"""`gated_linear_attention` against its formula in float64: gates, lengths, padding and samples."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.errors import BackendError
from mlx_mmfree.ops import gated_linear_attention, use_backend
from mlx_mmfree.ops.backend.dispatch import operations
from tests.emulator.emulator import Emulator
from tests.graph import launches
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

GATES = ("none", "head", "channel")
FLOAT32 = TOLERANCE[mx.float32]
Arrays = tuple[mx.array, ...]


_ON_A_CPU = [name for name in operations()["gated_linear_attention"].backends if name != "metal"]


@pytest.fixture(params=_ON_A_CPU)
def backend(request: pytest.FixtureRequest) -> str:
    try:
        with use_backend(request.param):
            gated_linear_attention(*arguments(2, "none"))
    except BackendError as error:
        pytest.skip(str(error))
    return request.param


def arguments(
    length: int, gate: str, sharpness: float = 1.0, sizes: tuple[int, ...] = ()
) -> Arrays:
    """`q`, `k`, `v`, `f` and a state; the sharper the gates, the nearer they are to 0 and 1."""
    mx.random.seed(length)
    batch, heads, keys, values = sizes or (2, 3, 8, 5)
    q, k = mx.random.normal((2, batch, heads, length, keys))
    v = mx.random.normal((batch, heads, length, values))
    width = {"none": 0, "head": 1, "channel": keys}[gate]
    f = mx.sigmoid(sharpness * mx.random.normal((batch, heads, length, width))) if width else None
    return q, k, v, f, mx.random.normal((batch, heads, keys, values))


def by_formula(*arrays: mx.array | None) -> Arrays:
    o, last = in_float64(*(None if x is None else np.array(x, np.float64) for x in arrays))
    return mx.array(o), mx.array(last)


def in_float64(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, f: np.ndarray | None, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    outputs = []
    for t in range(q.shape[2]):
        if f is not None:
            state = f[:, :, t, :, None] * state
        state = state + k[:, :, t, :, None] * v[:, :, t, None]
        outputs.append(np.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    return np.stack(outputs, axis=2), state


def assert_close(got: Arrays, want: Arrays, tolerance: float = FLOAT32) -> None:
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) <= tolerance


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_values(backend: str, gate: str, length: int) -> None:
    arrays = arguments(length, gate)
    with use_backend(backend):
        assert_close(gated_linear_attention(*arrays), by_formula(*arrays))


@pytest.mark.sample(2)
@pytest.mark.parametrize("gate", GATES)
def test_long_text_at_the_size_of_a_model(gate: str) -> None:
    arrays = arguments(8192, gate, 4.0, (1, 1, 64, 64))
    assert_close(gated_linear_attention(*arrays), by_formula(*arrays))


@pytest.mark.sample(2)
@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-10, 1.0])
def test_extreme_gates(backend: str, gate: str, value: float) -> None:
    q, k, v, f, state = arguments(150, gate, 20.0)
    f[:, :, ::3] = value
    f[:, :, 70:100] = value
    weights = mx.cos(mx.arange(v.size)).reshape(v.shape)

    def loss(*arrays: mx.array) -> mx.array:
        return (gated_linear_attention(*arrays)[0] * weights).sum()

    gradient = mx.grad(loss, argnums=range(5))
    with use_backend(backend):
        got, got_gradients = gated_linear_attention(q, k, v, f, state), gradient(q, k, v, f, state)
    with use_backend("reference"):
        want_gradients = gradient(q, k, v, f, state)
    assert_close(got, by_formula(q, k, v, f, state))
    assert_close(got_gradients, want_gradients, GRADIENT_TOLERANCE)


@pytest.mark.parametrize("gate", GATES)
def test_gradients_are_those_of_finite_differences(backend: str, gate: str) -> None:
    arrays = [x for x in arguments(70, gate, sizes=(1, 2, 4, 3)) if x is not None]
    directions = [mx.random.normal(x.shape) for x in arrays]
    weights = mx.cos(mx.arange(2 * 70 * 3)).reshape(arrays[2].shape)

    def loss(q: mx.array, k: mx.array, v: mx.array, *others: mx.array) -> mx.array:
        *f, state = others
        o, last = gated_linear_attention(q, k, v, f[0] if f else None, state)
        return (o * weights).sum() + (last * mx.sin(mx.arange(last.size).reshape(last.shape))).sum()

    def exact(step: float) -> float:
        moved = [
            np.array(x, np.float64) + step * np.array(d, np.float64)
            for x, d in zip(arrays, directions, strict=True)
        ]
        q, k, v, *f, state = moved
        o, last = in_float64(q, k, v, f[0] if f else None, state)
        sines = np.sin(np.arange(last.size).reshape(last.shape))
        return float((o * np.array(weights, np.float64)).sum() + (last * sines).sum())

    with use_backend(backend):
        gradients = mx.grad(loss, argnums=range(len(arrays)))(*arrays)
    along = sum((g * d).sum().item() for g, d in zip(gradients, directions, strict=True))
    want = (exact(1e-6) - exact(-1e-6)) / 2e-6
    assert abs(along - want) <= GRADIENT_TOLERANCE * max(1.0, abs(want))


@pytest.mark.parametrize("gate", GATES)
def test_heads_side_by_side(backend: str, gate: str) -> None:
    arrays = arguments(70, gate, sizes=(2, 3, 19, 21))
    split = [None if x is None else mx.contiguous(x.swapaxes(1, 2)) for x in arrays[:4]]

    weights = mx.cos(mx.arange(2 * 70 * 3 * 21)).reshape(2, 70, 3, 21)

    def read(*arrays: mx.array) -> mx.array:
        q, k, v, *f = (x.swapaxes(1, 2) for x in arrays[:-1])
        o, _ = gated_linear_attention(q, k, v, f[0] if f else None, arrays[-1])
        return o.swapaxes(1, 2)

    given = [x for x in (*split, arrays[-1]) if x is not None]
    gradient = mx.grad(lambda *arrays: (read(*arrays) * weights).sum(), argnums=range(len(given)))
    with use_backend(backend):
        got, got_gradients = read(*given), gradient(*given)
    with use_backend("reference"):
        want_gradients = gradient(*given)
    assert_close((got.swapaxes(1, 2),), by_formula(*arrays)[:1])
    assert_close(got_gradients, want_gradients, GRADIENT_TOLERANCE)


@pytest.mark.parametrize("gate", GATES)
def test_gradient_of_a_gradient(backend: str, gate: str) -> None:
    if backend == "chunked":
        pytest.skip("the kernel of its linear scan has no gradient of a gradient")
    arrays = arguments(20, gate, sizes=(1, 2, 4, 3))

    def penalty(q: mx.array) -> mx.array:
        inner = mx.grad(lambda q: (gated_linear_attention(q, *arrays[1:])[0] ** 2).sum())
        return (inner(q) ** 2).sum()

    with use_backend(backend):
        got = mx.grad(penalty)(arrays[0])
    with use_backend("reference"):
        assert_close((got,), (mx.grad(penalty)(arrays[0]),), GRADIENT_TOLERANCE)


@pytest.mark.parametrize("gate", GATES)
def test_padding_and_starts(backend: str, gate: str) -> None:
    q, k, v, f, state = arguments(100, gate)
    rows = mx.arange(100) + mx.array([[0], [1]])
    valid, starts = rows % 7 != 3, rows % 41 == 30
    # what stands at padding is never computed with
    v = mx.where(valid[:, None, :, None], v, mx.nan)
    with use_backend(backend):
        o, last = gated_linear_attention(q, k, v, f, state, valid=valid, starts=starts)
    for row in range(2):
        before, real = state[row : row + 1], np.flatnonzero(np.array(valid[row]))
        begins = [n for n in np.flatnonzero(np.array(starts[row])) if valid[row, n].item()]
        for first, stop in zip([0, *begins], [*begins, 100], strict=True):
            index = mx.array([int(n) for n in real if first <= n < stop])
            own = [None if x is None else x[row : row + 1][:, :, index] for x in (q, k, v, f)]
            want, before = by_formula(*own, before if first == 0 else mx.zeros(before.shape))
            assert relative_error(o[row : row + 1][:, :, index], want) <= FLOAT32
        assert relative_error(last[row : row + 1], before) <= FLOAT32


@pytest.mark.metal
@pytest.mark.parametrize("gate", GATES)
def test_a_step_on_metal_reads_and_writes_the_state_once(emulated: Emulator, gate: str) -> None:
    # two chunks of a column, and more columns than lanes
    arrays = arguments(3, gate, sizes=(2, 2, 20, 33))
    with use_backend("metal"):
        assert_close(gated_linear_attention(*arrays), by_formula(*arrays))
    record, state = emulated.records[-1], arrays[-1].nbytes
    assert record.loaded["state"] == record.stored["last"] == state
    # all 32 lanes of both groups of columns read the same keys and queries
    assert record.loaded["q"] == record.loaded["k"] == 2 * 32 * arrays[0].nbytes


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("length", "keys", "values"), [(33, 1, 1), (65, 20, 33), (200, 20, 5)])
def test_chunks_on_metal(metal: None, gate: str, length: int, keys: int, values: int) -> None:
    arrays = arguments(length, gate, 4.0, (2, 2, keys, values))
    if arrays[3] is not None:
        arrays[3][:, :, ::7] = 0.0
    with use_backend("metal"):
        assert_close(gated_linear_attention(*arrays), by_formula(*arrays))


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("length", [3, 65])
@pytest.mark.parametrize("keys", [288, 300])
def test_wide_keys_on_metal(metal: None, gate: str, length: int, keys: int) -> None:
    # a thread holds twice as many numbers, and of 300 the last thread not all
    arrays = arguments(length, gate, 4.0, (1, 1, keys, 5))
    with use_backend("metal"):
        assert_close(gated_linear_attention(*arrays), by_formula(*arrays))


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_chunks_on_metal_of_other_dtypes(metal: None, gate: str, dtype: mx.Dtype) -> None:
    q, k, v, f, state = arguments(70, gate, sizes=(1, 2, 20, 33))
    q, k, v, f = (None if x is None else x.astype(dtype) for x in (q, k, v, f))
    with use_backend("metal"):
        o, last = gated_linear_attention(q, k, v, f, state)
    want = by_formula(*(None if x is None else x.astype(mx.float32) for x in (q, k, v, f, state)))
    assert o.dtype == dtype and relative_error(o, want[0]) <= TOLERANCE[dtype]
    assert last.dtype == mx.float32 and relative_error(last, want[1]) <= FLOAT32


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("length", [130, 260])
def test_chunks_on_metal_read_what_they_must(emulated: Emulator, gate: str, length: int) -> None:
    arrays = arguments(length, gate, sizes=(2, 2, 20, 33))
    q, _, v, f, state = arrays
    with use_backend("metal"):
        gated_linear_attention(*arrays)
        emulated.records.clear()
        assert_close(gated_linear_attention(*arrays), by_formula(*arrays))
    sums, carry, read = emulated.records
    chunks = -(-length // 64)
    # both groups of columns read the keys, each once
    assert sums.loaded["k"] == read.loaded["k"] == read.loaded["q"] == 2 * q.nbytes
    # each of the two chunks of a column reads its values
    assert sums.loaded["v"] == read.loaded["v"] == 2 * v.nbytes
    assert read.stored["o"] == v.nbytes
    for moved in (sums.stored["sums"], carry.loaded["sums"], carry.stored["before"]):
        assert moved == chunks * state.nbytes == read.loaded["before"]
    assert carry.loaded["state"] == carry.stored["last"] == state.nbytes
    if f is not None:
        # a gate for each head is read for each key
        assert sums.loaded["f"] == read.loaded["f"] == 2 * q.nbytes
        assert sums.stored["gates"] == chunks * state.nbytes // 33


@pytest.mark.metal
@pytest.mark.parametrize("gate", GATES)
def test_gradient_of_chunks_on_metal(metal: None, gate: str) -> None:
    given = [x for x in arguments(70, gate, sizes=(1, 2, 20, 5)) if x is not None]

    def loss(*arrays: mx.array) -> mx.array:
        q, k, v, *f, state = arrays
        o, last = gated_linear_attention(q, k, v, f[0] if f else None, state)
        return (o**2).sum() + (last * mx.cos(mx.arange(last.size)).reshape(last.shape)).sum()

    gradient = mx.grad(loss, argnums=range(len(given)))
    with use_backend("metal"):
        got = gradient(*given)
    with use_backend("reference"):
        assert_close(got, gradient(*given), GRADIENT_TOLERANCE)


@pytest.mark.parametrize("gate", GATES)
def test_the_gradient_takes_as_many_launches_for_any_length(recorded: None, gate: str) -> None:
    def launched(length: int) -> int:
        q, k, v, f, state = arguments(length, gate, sizes=(1, 2, 20, 5))
        given = [q, k, v, state, *([] if f is None else [f])]

        def loss(*arrays: mx.array) -> mx.array:
            q, k, v, state, *f = arrays
            return gated_linear_attention(q, k, v, f[0] if f else None, state)[0].sum()

        mx.eval(given)
        return launches(mx.grad(loss, argnums=range(len(given)))(*given)).total()

    assert launched(200) == launched(2000) <= {"none": 40, "head": 263, "channel": 310}[gate]


@pytest.mark.parametrize(
    ("argument", "shape"),
    [("q", (2, 3, 4)), ("k", (2, 3, 4, 7)), ("v", (2, 3, 5, 5)), ("state", (2, 3, 5, 8))],
)
def test_shapes_that_do_not_fit(argument: str, shape: tuple[int, ...]) -> None:
    arrays = dict(zip(("q", "k", "v", "f", "state"), arguments(4, "head"), strict=True))
    with pytest.raises(ValueError, match=r"^\[gated_linear_attention\] 'q', 'k', 'v' and 'state'"):
        gated_linear_attention(**arrays | {argument: mx.zeros(shape)})


def test_a_gate_that_does_not_fit() -> None:
    q, k, v, _, state = arguments(4, "none")
    with pytest.raises(ValueError, match=r"^\[gated_linear_attention\] 'f' must have shape"):
        gated_linear_attention(q, k, v, mx.zeros((2, 3, 4, 2)), state)
