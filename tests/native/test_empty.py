"""The compiled operations themselves with nothing along a dimension, and with too much."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from mlx_mmfree import native

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

KERNELS = native.kernels()


def packed(outputs: int, inputs: int) -> mx.array:
    return mx.zeros((outputs, -(-inputs // 32) * 2), mx.uint32)


def bit_linear(rows: int, outputs: int, codes: bool) -> mx.array:
    projection = (packed(outputs, 40), mx.ones((1,)), None)
    return KERNELS.bit_linear(
        mx.ones((rows, 40)), [projection], None, False, codes, "", None, None, None
    )


def quantized(rows: int, outputs: int) -> mx.array:
    scales = mx.ones((outputs, 1))
    weight = mx.zeros((outputs, 4), mx.uint32)
    return KERNELS.dense_matmul(mx.ones((rows, 32)), weight, scales, scales, 4)


def mlgru_step(batch: int, length: int) -> tuple[mx.array, mx.array]:
    gates, state = mx.ones((batch, length, 12)), mx.full((batch, 4), 0.5)
    return KERNELS.mlgru_step(gates, state, mx.ones((4,)), 1e-6, None, None)


CALLS: dict[str, tuple[Callable[[], mx.array], tuple[int, ...]]] = {
    "ternary_matmul, no rows": (
        lambda: KERNELS.ternary_matmul(mx.ones((0, 40)), packed(3, 40), True),
        (0, 3),
    ),
    "ternary_matmul, no outputs": (
        lambda: KERNELS.ternary_matmul(mx.ones((2, 40)), packed(0, 40), False),
        (2, 0),
    ),
    "ternary_matmul, no inputs": (
        lambda: KERNELS.ternary_matmul(mx.ones((2, 0)), packed(3, 0), True),
        (2, 3),
    ),
    "gradient of ternary_matmul, no rows": (
        lambda: mx.grad(lambda x: KERNELS.ternary_matmul(x, packed(3, 40), False).sum())(
            mx.ones((0, 40))
        ),
        (0, 40),
    ),
    "gradient of ternary_matmul, no outputs": (
        lambda: mx.grad(lambda x: KERNELS.ternary_matmul(x, packed(0, 40), False).sum())(
            mx.ones((2, 40))
        ),
        (2, 40),
    ),
    "gradient of ternary_matmul, no inputs": (
        lambda: mx.grad(lambda x: KERNELS.ternary_matmul(x, packed(3, 0), False).sum())(
            mx.ones((2, 0))
        ),
        (2, 0),
    ),
    "dense_matmul, no rows": (
        lambda: KERNELS.dense_matmul(mx.ones((0, 8)), mx.ones((3, 8)), None, None, 0),
        (0, 3),
    ),
    "dense_matmul, no outputs": (
        lambda: KERNELS.dense_matmul(mx.ones((2, 8)), mx.ones((0, 8)), None, None, 0),
        (2, 0),
    ),
    "dense_matmul, no inputs": (
        lambda: KERNELS.dense_matmul(mx.ones((2, 0)), mx.ones((3, 0)), None, None, 0),
        (2, 3),
    ),
    "dense_matmul of codes, no rows": (lambda: quantized(0, 3), (0, 3)),
    "dense_matmul of codes, no outputs": (lambda: quantized(2, 0), (2, 0)),
    "rms_norm_quantize, no rows": (
        lambda: KERNELS.rms_norm_quantize(mx.ones((0, 8)), None, None, False)[1],
        (0, 1),
    ),
    "rms_norm_round, no rows": (
        lambda: KERNELS.rms_norm_round(mx.ones((0, 8)), None, None, False),
        (0, 8),
    ),
    "size_sums, no weights": (lambda: KERNELS.size_sums(mx.ones((0, 8))), (0,)),
    "pack_rounded, no outputs": (
        lambda: KERNELS.pack_rounded(mx.ones((0, 8)), mx.ones(1)),
        (0, 2),
    ),
    "pack_rounded, no inputs": (lambda: KERNELS.pack_rounded(mx.ones((3, 0)), mx.ones(1)), (3, 0)),
    "unpack_scaled, no outputs": (
        lambda: KERNELS.unpack_scaled(mx.zeros((0, 2), mx.uint32), mx.ones(1), 8),
        (0, 8),
    ),
    "bit_linear, no rows": (lambda: bit_linear(0, 3, True), (0, 3)),
    "bit_linear, no outputs": (lambda: bit_linear(2, 0, True), (2, 0)),
    "bit_linear, many rows, no outputs": (lambda: bit_linear(40, 0, False), (40, 0)),
    "linear_scan, no rows": (
        lambda: KERNELS.linear_scan(mx.ones((0, 3, 4)), mx.ones((0, 3, 4)), mx.ones((0, 4)))[0],
        (0, 3, 4),
    ),
    "linear_scan, no channels": (
        lambda: KERNELS.linear_scan(mx.ones((2, 3, 0)), mx.ones((2, 3, 0)), mx.ones((2, 0)))[0],
        (2, 3, 0),
    ),
    "mlgru_step, no rows": (lambda: mlgru_step(0, 3)[0], (0, 3, 4)),
    "mlgru_step, no length": (lambda: mlgru_step(2, 0)[0], (2, 0, 4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_empty(name: str) -> None:
    call, shape = CALLS[name]
    result = call()
    assert result.shape == shape
    assert not result.any().item()


def test_the_state_outlasts_an_empty_sequence() -> None:
    assert mx.array_equal(mlgru_step(2, 0)[1], mx.full((2, 4), 0.5))


def test_sums_of_codes_that_do_not_fit_are_refused() -> None:
    # views of one number: nothing is computed or allocated
    inputs = 2**22 + 32
    x = mx.broadcast_to(mx.array([127.0]), (1, inputs))
    weight = mx.broadcast_to(mx.array([[0]], mx.uint32), (1, inputs // 16))
    with pytest.raises(ValueError, match="4194304 inputs at most"):
        KERNELS.ternary_matmul(x, weight, True)
    with pytest.raises(ValueError, match="4194304 inputs at most"):
        projection = (weight, mx.ones((1,)), None)
        KERNELS.bit_linear(x, [projection], None, False, True, "", None, None, None)


def test_five_trits_a_byte_are_refused() -> None:
    x, weight = mx.ones((1, 40)), mx.zeros((3, 8), mx.uint8)
    with pytest.raises(ValueError, match=r"ternary_matmul.*which load_model unpacks to uint32"):
        KERNELS.ternary_matmul(x, weight, True)
    # beside a matrix of 2 bits, and alone
    five, two = (weight, mx.ones((1,)), None), (packed(3, 40), mx.ones((1,)), None)
    for projections in ([five], [two, five]):
        with pytest.raises(ValueError, match=r"bit_linear.*which load_model unpacks to uint32"):
            KERNELS.bit_linear(x, projections, None, False, True, "", None, None, None)


@pytest.mark.parametrize("trit", [1, -1])
def test_the_largest_sums_of_codes_are_right(instructions: str, trit: int) -> None:
    inputs = 2**22
    x = mx.full((1, inputs), -128.0)
    weight = mx.full((1, inputs // 16), 0xAAAAAAAA if trit > 0 else 0, mx.uint32)
    assert KERNELS.ternary_matmul(x, weight, True).item() == -128 * trit * inputs


def test_a_window_and_sinks_of_billions_are_a_window_and_sinks() -> None:
    keys = mx.ones((1, 1, 4, 2))
    positions = mx.array([[0, 1]], mx.int32)
    outputs = KERNELS.attention_step(
        mx.ones((1, 1, 6)), keys, keys, positions, 1, None, False, None, None, 1e-6, 2**31 - 10, 9
    )
    assert outputs[3].tolist() == [[0, 1, 2]]
