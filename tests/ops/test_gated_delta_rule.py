"""`gated_delta_rule` against its formula in float64: gates, removal, lengths, padding and samples."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.errors import BackendError
from mlx_mmfree.ops import gated_delta_rule, use_backend
from mlx_mmfree.ops.backend.dispatch import operations
from mlx_mmfree.ops.backend.gradient import without_gradients
from tests.emulator.emulator import Emulator
from tests.graph import launches, multiply_adds
from tests.ops.planting import BARRIER, Fault, assert_seen
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

# gates, and "removal" with vectors of its own
USES = ("none", "head", "channel", "removal", "removal, no gate")
FLOAT32 = TOLERANCE[mx.float32]
Given = dict[str, mx.array]

_ON_A_CPU = [name for name in operations()["gated_delta_rule"].backends if name != "metal"]


@pytest.fixture(params=_ON_A_CPU)
def backend(request: pytest.FixtureRequest) -> str:
    try:
        with use_backend(request.param):
            computed(**arguments(2, "none"))
    except BackendError as error:
        pytest.skip(str(error))
    return request.param


def arguments(length: int, use: str, sharpness: float = 1.0, sizes: tuple[int, ...] = ()) -> Given:
    """All arrays by name; keys have length 1, and the sharper the gates, the nearer to 0 and 1."""
    mx.random.seed(length)
    batch, heads, keys, values = sizes or (2, 3, 8, 5)
    rows = (batch, heads, length)
    k = unit(mx.random.normal((*rows, keys)))
    given = {
        "q": unit(mx.random.normal((*rows, keys))),
        "k": k,
        "v": mx.random.normal((*rows, values)),
        "beta": 2.0 * mx.sigmoid(mx.random.normal((*rows, 1))),
        "state": mx.random.normal((batch, heads, keys, values)),
    }
    width = {"head": 1, "channel": keys, "removal": keys}.get(use, 0)
    if width:
        given["f"] = mx.sigmoid(sharpness * mx.random.normal((*rows, width)))
    if use.startswith("removal"):
        read = unit(mx.random.normal((*rows, keys)))
        given |= {"a": read, "b": mx.sigmoid(mx.random.normal((*rows, keys))) * read}
    return given


def unit(x: mx.array) -> mx.array:
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def computed(**given: mx.array) -> tuple[mx.array, mx.array]:
    given = dict(given)
    options = {name: given.pop(name) for name in ("valid", "starts") if name in given}
    if "a" in given:
        options["removal"] = given.pop("a"), given.pop("b")
    given.setdefault("f", None)
    return gated_delta_rule(**given, **options)


def in_float64(given: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, beta, state = (given[name] for name in ("q", "k", "v", "beta", "state"))
    outputs = []
    for t in range(q.shape[2]):
        decayed = given["f"][:, :, t, :, None] * state if "f" in given else state
        key, value = k[:, :, t, :, None], v[:, :, t, None]
        scale = beta[:, :, t, :, None]
        if "a" in given:
            read = np.einsum("bhk,bhkv->bhv", given["a"][:, :, t], state)[:, :, None]
            state = decayed - given["b"][:, :, t, :, None] * read + scale * key * value
        else:
            read = np.einsum("bhk,bhkv->bhv", k[:, :, t], decayed)[:, :, None]
            state = decayed + scale * key * (value - read)
        outputs.append(np.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    return np.stack(outputs, axis=2), state


def by_formula(given: Given) -> tuple[mx.array, mx.array]:
    o, last = in_float64({name: np.array(x, np.float64) for name, x in given.items()})
    return mx.array(o), mx.array(last)


def assert_close(got, want, tolerance: float = FLOAT32) -> None:
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) <= tolerance


def loss_of(names: list[str]):
    """A weighted sum of both results, as a function of arrays in this order."""

    def loss(*arrays: mx.array) -> mx.array:
        o, last = computed(**dict(zip(names, arrays, strict=True)))
        weights = mx.cos(mx.arange(o.size)).reshape(o.shape)
        return (o * weights).sum() + (last * mx.sin(mx.arange(last.size)).reshape(last.shape)).sum()

    return loss


def gradients(given: Given) -> list[mx.array]:
    return mx.grad(loss_of(list(given)), argnums=list(range(len(given))))(*given.values())


@pytest.mark.sample(8)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_values(backend: str, use: str, length: int) -> None:
    given = arguments(length, use)
    with use_backend(backend):
        assert_close(computed(**given), by_formula(given))


@pytest.mark.sample(2)
@pytest.mark.parametrize("sizes", [(1, 2, 1, 1), (1, 1, 3, 40), (2, 1, 20, 33), (1, 2, 17, 128)])
@pytest.mark.parametrize("length", [1, 18])
@pytest.mark.parametrize("use", ["head", "removal"])
def test_sizes_that_fill_no_vectors(
    backend: str, use: str, length: int, sizes: tuple[int, ...]
) -> None:
    given = arguments(length, use, sizes=sizes)
    with use_backend(backend):
        got, got_gradients = computed(**given), gradients(given)
    with use_backend("reference"):
        want = gradients(given)
    assert_close(got, by_formula(given))
    assert_close(got_gradients, want, GRADIENT_TOLERANCE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("use", USES)
def test_long_text_at_the_size_of_a_model(use: str) -> None:
    given = arguments(4096, use, 4.0, (1, 1, 64, 64))
    assert_close(computed(**given), by_formula(given))


@pytest.mark.sample(2)
@pytest.mark.parametrize("use", ["head", "channel", "removal"])
@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-10, 1.0])
def test_extreme_gates(backend: str, use: str, value: float) -> None:
    given = arguments(150, use, 20.0)
    given["f"][:, :, ::3] = value
    given["f"][:, :, 70:100] = value
    with use_backend(backend):
        got, got_gradients = computed(**given), gradients(given)
    with use_backend("reference"):
        want_gradients = gradients(given)
    assert_close(got, by_formula(given))
    for name, g, w in zip(given, got_gradients, want_gradients, strict=True):
        # where every state is forgotten, the gradient of what comes before is nothing but rounding
        if mx.abs(w).max().item() > 1e-30:
            assert relative_error(g, w) <= GRADIENT_TOLERANCE, name
        else:
            assert mx.abs(g).max().item() <= 1e-30, name


def test_equal_keys_that_meet_in_every_chunk(backend: str) -> None:
    # the powers of the weights between positions grow to 1e18, their inverse does not
    given = arguments(128, "none")
    given["k"] = mx.broadcast_to(given["k"][:, :, :1], given["k"].shape)
    given["beta"] = mx.ones(given["beta"].shape)
    with use_backend(backend):
        assert_close(computed(**given), by_formula(given))


@pytest.mark.parametrize("use", USES)
def test_gradients_are_those_of_finite_differences(backend: str, use: str) -> None:
    given = arguments(70, use, sizes=(1, 2, 4, 3))
    directions = {
        name: np.array(mx.random.normal(x.shape), np.float64) for name, x in given.items()
    }

    def exact(step: float) -> float:
        moved = {n: np.array(x, np.float64) + step * directions[n] for n, x in given.items()}
        o, last = in_float64(moved)
        cosines = np.cos(np.arange(o.size)).reshape(o.shape)
        sines = np.sin(np.arange(last.size)).reshape(last.shape)
        return float((o * cosines).sum() + (last * sines).sum())

    with use_backend(backend):
        got = gradients(given)
    along = sum(
        float((np.array(g, np.float64) * directions[name]).sum())
        for name, g in zip(given, got, strict=True)
    )
    want = (exact(1e-6) - exact(-1e-6)) / 2e-6
    assert abs(along - want) <= GRADIENT_TOLERANCE * max(1.0, abs(want))


@pytest.mark.sample(2)
@pytest.mark.parametrize("use", ["head", "channel", "removal"])
def test_heads_side_by_side(backend: str, use: str) -> None:
    given = arguments(70, use, sizes=(2, 3, 19, 21))
    laid = {n: mx.contiguous(x.swapaxes(1, 2)) for n, x in given.items() if n != "state"}
    mx.eval(laid)

    def turned(arrays: Given) -> Given:
        return {name: x.swapaxes(1, 2) for name, x in arrays.items()} | {"state": given["state"]}

    def loss(arrays: Given) -> mx.array:
        o, _ = computed(**turned(arrays))
        return (o * mx.cos(mx.arange(o.size)).reshape(o.shape)).sum()

    with use_backend(backend):
        got, got_gradients = computed(**turned(laid)), mx.grad(loss)(laid)
    with use_backend("reference"):
        want_gradients = mx.grad(loss)(laid)
    assert_close(got, by_formula(given))
    assert_close(got_gradients.values(), want_gradients.values(), GRADIENT_TOLERANCE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("use", USES)
def test_gradient_of_a_gradient(backend: str, use: str) -> None:
    given = arguments(20, use, sizes=(1, 2, 4, 3))

    def penalty(k: mx.array) -> mx.array:
        inner = mx.grad(lambda k: (computed(**given | {"k": k})[0] ** 2).sum())
        return (inner(k) ** 2).sum()

    with use_backend(backend):
        got = mx.grad(penalty)(given["k"])
    with use_backend("reference"):
        assert_close((got,), (mx.grad(penalty)(given["k"]),), GRADIENT_TOLERANCE)


@pytest.mark.parametrize("use", USES)
def test_padding_and_starts(backend: str, use: str) -> None:
    given = arguments(100, use)
    rows = mx.arange(100) + mx.array([[0], [1]])
    valid, starts = rows % 7 != 3, rows % 41 == 30
    # what stands at padding is never computed with
    padded = {
        name: x if name == "state" else mx.where(valid[:, None, :, None], x, mx.nan)
        for name, x in given.items()
    }
    with use_backend(backend):
        o, last = computed(**padded, valid=valid, starts=starts)
    for row in range(2):
        own = {name: x[row : row + 1] for name, x in given.items()}
        before, real = own.pop("state"), np.flatnonzero(np.array(valid[row]))
        begins = [n for n in np.flatnonzero(np.array(starts[row])) if valid[row, n].item()]
        for first, stop in zip([0, *begins], [*begins, 100], strict=True):
            index = mx.array([int(n) for n in real if first <= n < stop])
            before = before if first == 0 else mx.zeros(before.shape)
            part = {name: x[:, :, index] for name, x in own.items()} | {"state": before}
            want, before = by_formula(part)
            assert relative_error(o[row : row + 1][:, :, index], want) <= FLOAT32
        assert relative_error(last[row : row + 1], before) <= FLOAT32


@pytest.mark.parametrize("use", USES)
def test_parts(backend: str, use: str) -> None:
    given = arguments(100, use)
    state, outputs = given.pop("state"), []
    with use_backend(backend):
        whole, last = computed(**given, state=state)
        for first, stop in ((0, 1), (1, 2), (2, 67), (67, 100)):
            part = {name: x[:, :, first:stop] for name, x in given.items()}
            o, state = computed(**part, state=state)
            outputs.append(o)
    parts = mx.concatenate(outputs, axis=2)
    if backend == "chunked":
        assert_close((parts, state), (whole, last))
    else:
        assert mx.array_equal(parts, whole) and mx.array_equal(state, last)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_other_dtypes_are_computed_in_float32(backend: str, dtype: mx.Dtype) -> None:
    given = arguments(40, "removal")
    low = {name: x if name == "state" else x.astype(dtype) for name, x in given.items()}
    with use_backend(backend):
        o, last = computed(**low)
    want = by_formula({name: x.astype(mx.float32) for name, x in low.items()})
    assert o.dtype == dtype and relative_error(o, want[0]) <= TOLERANCE[dtype]
    assert last.dtype == mx.float32 and relative_error(last, want[1]) <= FLOAT32


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("values", [33, 128])
def test_a_step_on_metal_reads_and_writes_the_state_once(
    emulated: Emulator, use: str, values: int
) -> None:
    # two segments of a column, and more columns than lanes or four to a lane
    given = arguments(3, use, sizes=(2, 2, 20, values))
    with use_backend("metal"):
        assert_close(computed(**given), by_formula(given))
    record, state = emulated.records[-1], given["state"].nbytes
    assert record.loaded["state"] == record.stored["last"] == state
    # all lanes of a group of columns, of which a thread has four, two or one, read the same keys
    groups = 1 if values % 4 == 0 and not use.startswith("removal") else 2
    assert record.loaded["q"] == record.loaded["k"] == groups * 32 * given["q"].nbytes


@pytest.mark.metal
@pytest.mark.parametrize(("keys", "values"), [(128, 132), (129, 128), (200, 8)])
def test_a_step_on_metal_of_many_keys(metal: None, keys: int, values: int) -> None:
    given = arguments(2, "channel", sizes=(1, 1, keys, values))
    with use_backend("metal"):
        assert_close(computed(**given), by_formula(given))


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("length", "keys", "values"),
    [
        (33, 1, 1),
        (65, 32, 33),
        (200, 20, 5),
        (66, 32, 66),
        (70, 130, 3),
        (70, 288, 3),
        (70, 260, 2),
    ],
)
def test_chunks_on_metal(metal: None, use: str, length: int, keys: int, values: int) -> None:
    given = arguments(length, use, 4.0, (2, 2, keys, values))
    if "f" in given:
        given["f"][:, :, ::7] = 0.0
    with use_backend("metal"):
        assert_close(computed(**given), by_formula(given))


@pytest.mark.metal
@pytest.mark.parametrize("use", ["head", "removal"])
def test_chunks_on_metal_read_and_write_each_state_once(emulated: Emulator, use: str) -> None:
    given = arguments(130, use, sizes=(2, 2, 32, 32))
    with use_backend("metal"):
        computed(**given)
        emulated.records.clear()
        assert_close(computed(**given), by_formula(given))
    lead = next(record for record in emulated.records if "lead" in record.kernel)
    state = given["state"].nbytes
    assert lead.loaded["state"] == lead.stored["last"] == state
    assert lead.stored["before"] == 3 * state
    assert lead.loaded.get("added", 0) == (3 * state if use == "removal" else 0)


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("use", ["none", "channel", "removal"])
@pytest.mark.parametrize("length", [3, 70, 200])
def test_gradient_on_metal(metal: None, use: str, length: int) -> None:
    given = arguments(length, use, sizes=(1, 2, 20, 5))
    with use_backend("metal"):
        got = gradients(given)
    with use_backend("reference"):
        assert_close(got, gradients(given), GRADIENT_TOLERANCE)


@pytest.mark.metal
def test_gradient_of_a_gradient_on_metal(metal: None) -> None:
    given = arguments(70, "channel", sizes=(1, 2, 4, 3))

    def penalty(k: mx.array) -> mx.array:
        inner = mx.grad(lambda k: (computed(**given | {"k": k})[0] ** 2).sum())
        return (inner(k) ** 2).sum()

    with use_backend("metal"):
        got = mx.grad(penalty)(given["k"])
    with use_backend("chunked"):
        assert_close((got,), (mx.grad(penalty)(given["k"]),), GRADIENT_TOLERANCE)


@pytest.mark.usefixtures("recorded", "traced")
@pytest.mark.parametrize("use", USES)
def test_a_gradient_takes_as_many_launches_for_any_length(use: str) -> None:
    def launched(length: int) -> int:
        given = arguments(length, use, sizes=(1, 2, 20, 5))
        mx.eval(given)
        return launches(gradients(given)).total()

    assert launched(200) == launched(2000)


@pytest.mark.parametrize("use", USES)
def test_a_prompt_takes_as_many_launches_for_any_length(recorded: None, use: str) -> None:
    def launched(length: int) -> int:
        given = arguments(length, use, sizes=(1, 2, 20, 5))
        mx.eval(given)
        return launches(computed(**given)).total()

    # with a last chunk that is filled up
    assert launched(201) == launched(2001)
    if use in ("none", "head"):
        assert launched(200) == 13 and launched(201) == 21


@pytest.mark.parametrize("length", [33, 40, 64, 65, 130, 512])
def test_products_of_chunks(recorded: None, length: int) -> None:
    """Chunks are about as long as each other, and not filled up to 64 positions."""
    keys, values = 8, 6
    given = arguments(length, "head", sizes=(1, 1, keys, values))
    mx.eval(given)

    def outputs(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        return computed(**dict(zip(given, arrays, strict=True)))

    chunks = -(-length // 64)
    size = -(-length // chunks)
    # queries and reads with keys, the inverse with reads and values, weights with what is written
    within = size * size * (3 * keys + 2 * values)
    wanted = chunks * (within + size * keys * values)
    with without_gradients():
        assert multiply_adds(outputs, *given.values()) == wanted


@pytest.mark.parametrize(
    ("argument", "shape"),
    [("q", (2, 3, 4)), ("k", (2, 3, 4, 7)), ("v", (2, 3, 5, 5)), ("state", (2, 3, 5, 8))],
)
def test_shapes_that_do_not_fit(argument: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^\[gated_delta_rule\] 'q', 'k', 'v' and 'state'"):
        computed(**arguments(4, "head") | {argument: mx.zeros(shape)})


@pytest.mark.parametrize(("argument", "name"), [("f", "f"), ("beta", "beta"), ("b", "removal")])
def test_other_arrays_that_do_not_fit(argument: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^\[gated_delta_rule\] '{name}' must"):
        computed(**arguments(4, "removal") | {argument: mx.zeros((2, 3, 4, 2))})


def step_of(use: str) -> None:
    given = arguments(3, use, sizes=(2, 2, 20, 33))
    with use_backend("metal"):
        assert_close(computed(**given), by_formula(given))


def step() -> None:
    step_of("channel")


def step_that_removes() -> None:
    step_of("removal")


def chunks_of(use: str) -> None:
    given = arguments(130, use, sizes=(2, 2, 20, 33))
    with use_backend("metal"):
        assert_close(computed(**given), by_formula(given))


def chunks() -> None:
    chunks_of("channel")


def chunks_of_heads() -> None:
    chunks_of("head")


def chunks_that_remove() -> None:
    chunks_of("removal")


KERNELS = {
    step: "gated_delta_rule_channel",
    step_that_removes: "gated_delta_rule_channel_removal",
    chunks: "gated_delta_rule_lead_channel",
    chunks_of_heads: "gated_delta_rule_between",
    chunks_that_remove: "gated_delta_rule_inverse",
}

FAULTS = {
    "step: barrier before reads are added up": Fault(step, BARRIER, "", 0),
    "step: barrier before they are replaced": Fault(step, BARRIER, "", 1),
    "step: barrier before outputs are added up": Fault(step, BARRIER, "", 2),
    "step: barrier before the next position": Fault(step, BARRIER, "", 3),
    "step: segments left out": Fault(step, "p < PARTS", "p < PARTS - 1", 0),
    "step: gate left out": Fault(step, "gate * piece[i][c]", "piece[i][c]", 0),
    "step: nothing removed": Fault(step, "written[c] -= sum;", "", 0),
    "step: columns beyond the last": Fault(step, "column < values", "true", 0),
    "step: rows beyond the last": Fault(step, "first + i < keys", "true", 1),
    "step: state of another head": Fault(step, "head * keys * values + column", "column", 0),
    "removal: under the key": Fault(step_that_removes, "removed = b[", "removed = k[", 0),
    "removal: added": Fault(step_that_removes, "held -= removed", "held += removed", 0),
    "chunks: barrier before reads are added up": Fault(chunks, BARRIER, "", 0),
    "chunks: barrier before they are replaced": Fault(chunks, BARRIER, "", 1),
    "chunks: state before the chunk": Fault(
        chunks, "kept[place + i * dims + c] = piece", "kept[place + i * dims + c] = 0 * piece", 0
    ),
    "chunks: gates of another chunk": Fault(chunks, "gates + chunk *", "gates + head *", 0),
    "chunks: what was read is stored": Fault(chunks, "value[at] - sum", "value[at]", 0),
    "chunks: state stays": Fault(chunks, "fma(number, left[c], piece[i][c])", "piece[i][c]", 0),
    "chunks: segments left out": Fault(chunks, "p < PARTS", "p < PARTS - 1", 0),
    "chunks: columns beyond the last": Fault(chunks, "column < dims", "true", 0),
    "chunks: rows beyond the last": Fault(chunks, "first + i < keys", "true", 1),
    "between: barrier before gates are read": Fault(chunks_of_heads, BARRIER, "", 0),
    "between: barrier before blocks are merged": Fault(chunks_of_heads, BARRIER, "", 1),
    "between: barrier between products": Fault(chunks_of_heads, BARRIER, "", 2),
    "between: gates beyond the last": Fault(chunks_of_heads, "&& position < length", "", 0),
    "between: a gate too early": Fault(
        chunks_of_heads, "column + 1; n < first", "column; n < first", 0
    ),
    "between: above the diagonal": Fault(
        chunks_of_heads, "column > row ? 0.0f : asked", "asked", 0
    ),
    "inverse: barrier between products": Fault(chunks_that_remove, BARRIER, "", 1),
    "inverse: the other sign": Fault(chunks_that_remove, "= -sum;", "= sum;", 0),
    "inverse: blocks of one size left out": Fault(
        chunks_that_remove, "int bits = 2", "int bits = 3", 0
    ),
    "inverse: columns of small blocks": Fault(chunks_that_remove, "* solved[m]", "", 0),
}


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_metal_are_seen(
    name: str, emulated: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    assert_seen(fault, KERNELS[fault.check], emulated, monkeypatch)
