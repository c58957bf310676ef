"""The compiled scan against the definition: values, final state and every gradient."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from mlx_mmfree import native
from mlx_mmfree.ops import backend_report
from mlx_mmfree.ops.linear_scan import native as compiled
from mlx_mmfree.ops.linear_scan import reference

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

OP = "mlx_mmfree.ops.linear_scan"
Scan = Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]
SIZES = [(1, 1, 1), (2, 5, 33), (3, 100, 16), (1, 63, 130), (4, 1, 31)]


def random_inputs(batch: int, length: int, dims: int) -> tuple[mx.array, mx.array, mx.array]:
    mx.random.seed(batch * 10007 + length * 101 + dims)
    f = mx.sigmoid(mx.random.normal((batch, length, dims)))
    i = mx.random.normal((batch, length, dims))
    return f, i, mx.random.normal((batch, dims))


def weighted(scan: Scan, weight: mx.array, last_weight: mx.array) -> Callable[..., mx.array]:
    def loss(f: mx.array, i: mx.array, state: mx.array) -> mx.array:
        states, last = scan(f, i, state)
        return (states * weight).sum() + (last * last_weight).sum()

    return loss


def assert_close(got: mx.array, wanted: mx.array, tolerance: float) -> None:
    assert got.shape == wanted.shape
    assert (mx.abs(got - wanted).max() <= tolerance * mx.abs(wanted).max()).item()


@pytest.mark.parametrize("size", [*SIZES, (3, 400, 300)], ids=str)
def test_values_are_bit_equal(size: tuple[int, int, int], threads: int) -> None:
    inputs = random_inputs(*size)
    for got, wanted in zip(compiled(*inputs), reference(*inputs), strict=True):
        assert mx.array_equal(got, wanted)


def parts(f: mx.array, i: mx.array, state: mx.array) -> dict[str, tuple[mx.array, ...]]:
    """The same numbers as parts of larger arrays, or fewer numbers read more than once."""
    return {
        "halves": (*mx.split(mx.concatenate([f, i], axis=-1), 2, axis=-1), state),
        "steps before batch": (
            *(mx.contiguous(x.swapaxes(0, 1)).swapaxes(0, 1) for x in (f, i)),
            state,
        ),
        "one row for all": (mx.broadcast_to(f[:1, :1], f.shape), i, state),
        "one number a step": (mx.broadcast_to(f[..., :1], f.shape), i, state),
        "one number": (mx.broadcast_to(f[:1, :1, :1], f.shape), i, state),
        "backwards": (f[:, ::-1], i[::-1], state[::-1]),
        "every second": (f[..., ::2], i[..., ::2], state[:, ::2]),
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [(3, 7, 34), (2, 40, 1), (1, 1, 6)], ids=str)
@pytest.mark.parametrize("variant", list(parts(*random_inputs(1, 1, 2))))
def test_inputs_of_any_layout(variant: str, size: tuple[int, int, int], threads: int) -> None:
    inputs = parts(*random_inputs(*size))[variant]
    copies = tuple(mx.contiguous(x) for x in inputs)
    for got, wanted in zip(compiled(*inputs), reference(*copies), strict=True):
        assert mx.array_equal(got, wanted)
    weight, _, last_weight = random_inputs(*inputs[0].shape)
    got, wanted = (
        mx.grad(weighted(scan, weight, last_weight), argnums=(0, 1, 2))(*arrays)
        for scan, arrays in ((compiled, inputs), (reference, copies))
    )
    for ours, theirs in zip(got, wanted, strict=True):
        assert_close(ours, theirs, 1e-6)


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("transform", [lambda f: f, mx.compile], ids=["plain", "compiled"])
def test_gradients(size: tuple[int, int, int], transform: Callable) -> None:
    inputs = random_inputs(*size)
    weight, _, last_weight = random_inputs(*size)
    got, wanted = (
        transform(mx.grad(weighted(scan, weight, last_weight), argnums=(0, 1, 2)))(*inputs)
        for scan in (compiled, reference)
    )
    for ours, theirs in zip(got, wanted, strict=True):
        assert_close(ours, theirs, 1e-6)


def test_one_gradient_at_a_time() -> None:
    inputs = random_inputs(2, 7, 9)
    weight, _, last_weight = random_inputs(2, 7, 9)
    loss = weighted(compiled, weight, last_weight)
    together = mx.grad(loss, argnums=(0, 1, 2))(*inputs)
    for argument in range(3):
        assert mx.array_equal(mx.grad(loss, argnums=argument)(*inputs), together[argument])


def test_rows_and_chunks_keep_their_bits() -> None:
    f, i, state = random_inputs(5, 40, 67)
    states, last = compiled(f, i, state)
    row_states, row_last = compiled(f[3:4], i[3:4], state[3:4])
    assert mx.array_equal(row_states, states[3:4]) and mx.array_equal(row_last, last[3:4])
    chunks = []
    carried = state
    for start, stop in ((0, 1), (1, 18), (18, 40)):
        chunk, carried = compiled(f[:, start:stop], i[:, start:stop], carried)
        chunks.append(chunk)
    assert mx.array_equal(mx.concatenate(chunks, axis=1), states) and mx.array_equal(carried, last)


def test_strided_inputs() -> None:
    f, i, state = random_inputs(6, 4, 10)
    turned = f.transpose(1, 0, 2), i[::-1].transpose(1, 0, 2), mx.broadcast_to(state[:1], (4, 10))
    for got, wanted in zip(compiled(*turned), reference(*turned), strict=True):
        assert mx.array_equal(got, wanted)


def test_half_precision_is_computed_in_float32() -> None:
    f, i, state = random_inputs(2, 6, 8)
    inputs = f.astype(mx.bfloat16), i.astype(mx.float16), state
    states, last = compiled(*inputs)
    assert states.dtype == last.dtype == mx.float32
    assert mx.array_equal(states, reference(*inputs)[0])


def test_empty_sequence_keeps_the_state() -> None:
    state = mx.arange(6, dtype=mx.float32).reshape(2, 3)
    states, last = compiled(mx.zeros((2, 0, 3)), mx.zeros((2, 0, 3)), state)
    assert states.shape == (2, 0, 3)
    assert mx.array_equal(last, state)


def test_vmap_and_its_gradients() -> None:
    f, i, state = random_inputs(2, 9, 8)
    many_f = mx.stack([f, f * 0.5, f * 0.1])
    many_i = mx.stack([i, -i, i * 2], axis=2)
    expected = [reference(many_f[n], many_i[:, :, n], state)[0] for n in range(3)]
    mapped = mx.vmap(compiled, in_axes=(0, 2, None))
    assert mx.array_equal(mapped(many_f, many_i, state)[0], mx.stack(expected))

    def one(f: mx.array, i: mx.array) -> mx.array:
        return compiled(f, i, state)[0].square().sum()

    def one_reference(f: mx.array, i: mx.array) -> mx.array:
        return reference(f, i, state)[0].square().sum()

    wanted = mx.stack([mx.grad(one_reference)(many_f[n], many_i[:, :, n]) for n in range(3)])
    inside = mx.vmap(mx.grad(one), in_axes=(0, 2))(many_f, many_i)
    outside = mx.grad(lambda x: mx.vmap(one, in_axes=(0, 2))(x, many_i).sum())(many_f)
    assert_close(inside, wanted, 1e-6)
    assert_close(outside, wanted, 1e-6)


def test_kernel_checks_its_arguments() -> None:
    kernel = native.kernels().linear_scan
    with pytest.raises(ValueError, match=r"must be \(B, L, D\)"):
        kernel(mx.zeros((2, 3, 4)), mx.zeros((2, 3, 4)), mx.zeros((2, 3)))
    with pytest.raises(ValueError, match="must be float32"):
        kernel(mx.zeros((2, 3, 4), mx.float16), mx.zeros((2, 3, 4)), mx.zeros((2, 4)))


def test_other_devices_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs(1, 2, 3)
    if mx.default_device() == mx.Device(mx.cpu):
        assert backend_report(OP, *inputs)["native"] is None
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert backend_report(OP, *inputs)["native"] == "the default device is not the CPU"
