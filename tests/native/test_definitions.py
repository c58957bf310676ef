"""Shapes, dtypes and slots that C++ computes itself equal the definitions in Python."""

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree import native, ops
from mlx_mmfree.ops.attention_step import new_slots, slot_positions, slots_after
from mlx_mmfree.ops.backend.dispatch import operations

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

FLOATS = [mx.float32, mx.float16, mx.bfloat16]
Call = Callable[[], Any]


def zeros(*shape: int) -> mx.array:
    return mx.zeros(shape, random.choice(FLOATS))


def number() -> int:
    return random.randint(1, 9)


def perhaps(value: Any) -> Any:
    return random.choice([value, None])


def batched(*last: int) -> mx.array:
    return zeros(*(number() for _ in range(random.randint(0, 3))), *last)


def activate() -> Call:
    x, name = batched(), random.choice(["silu", "relu2", "gelu", "relu"])
    return lambda: ops.activate(x, name)


def adamw() -> Call:
    w = mx.zeros([number() for _ in range(random.randint(0, 3))])
    return lambda: ops.adamw(w, w, w, w, mx.ones(3), betas=(0.9, 0.95), eps=1e-8)


def attention() -> Call:
    batch, groups, length, count, dims = (number() for _ in range(5))
    q = zeros(batch, groups * number(), length, dims)
    k, v = zeros(batch, groups, count, dims), zeros(batch, groups, count, number())
    return lambda: ops.attention(q, k, v)


def attention_step() -> Call:
    batch, groups, shared, half = (number() for _ in range(4))
    used, heads, dims = random.randint(0, 9), groups * shared, 2 * half
    shape = (batch, groups, used + number(), dims)
    positions = mx.zeros((batch, used), mx.int32)
    projected = zeros(batch, 1, (heads + 2 * groups) * dims)
    keys, values, norm = zeros(*shape), zeros(*shape), perhaps(zeros(dims))
    options = {"wavelengths": perhaps(mx.ones(half)), "query_norm": norm, "key_norm": norm}
    options |= {"num_heads": heads, "window": perhaps(number()), "sinks": random.randint(0, 3)}
    return lambda: ops.attention_step(projected, keys, values, positions, **options)


def bit_linear() -> Call:
    dims, eps, gate = number(), perhaps(1e-6), perhaps("silu")
    projections = [
        ops.Projection(
            mx.zeros((number(), ops.packed_width(dims)), mx.uint32),
            mx.ones(1),
            None if eps is None else zeros(dims),
        )
        for _ in range(number())
    ]
    x = batched(2 * dims if gate else dims)
    return lambda: ops.bit_linear(x, projections, eps=eps, gate=gate)


def cross_entropy() -> Call:
    logits = batched(number())
    return lambda: ops.cross_entropy(logits, mx.zeros(logits.shape[:-1], mx.int32))


def dense_matmul() -> Call:
    weight, x = zeros(number(), 64), batched(64)
    if random.random() < 0.5:
        return lambda: ops.dense_matmul(x, weight)
    bits, rounds = random.choice([(4, None), (2, None), (2, 8)])
    variant = ops.AffineFormat(*mx.quantize(weight, group_size=32, bits=bits)[1:], 32, bits)
    codes = mx.quantize(weight, group_size=32, bits=bits)[0]
    return lambda: ops.dense_matmul(x, codes, variant, activation_bits=rounds)


def depthwise_convolution() -> Call:
    dims, side, stride = number(), random.choice([1, 3, 5, 7]), number()
    x, weight = zeros(number(), number(), number(), dims), zeros(dims, side, side, 1)
    bias = perhaps(zeros(dims))
    return lambda: ops.depthwise_convolution(x, weight, bias, stride=stride)


def gated_activation() -> Call:
    gate, name = batched(number()), random.choice(["silu", "relu2", "gelu", "relu"])
    return lambda: ops.gated_activation(gate, mx.zeros_like(gate), name)


def gated_delta_rule() -> Call:
    batch, heads, length, keys, values = (number() for _ in range(5))
    q, v = zeros(batch, heads, length, keys), zeros(batch, heads, length, values)
    beta = perhaps(zeros(batch, heads, length, 1))
    f = perhaps(zeros(batch, heads, length, random.choice([1, keys])))
    state, removal = mx.zeros((batch, heads, keys, values)), perhaps((q, q))
    return lambda: ops.gated_delta_rule(q, q, v, beta, f, state, removal=removal)


def gated_linear_attention() -> Call:
    batch, heads, length, keys, values = (number() for _ in range(5))
    q, v = zeros(batch, heads, length, keys), zeros(batch, heads, length, values)
    f = perhaps(zeros(batch, heads, length, random.choice([1, keys])))
    state = mx.zeros((batch, heads, keys, values))
    return lambda: ops.gated_linear_attention(q, q, v, f, state)


def hadamard() -> Call:
    block = 2 ** random.randint(1, 6)
    dims = block * number()
    x, signs, inverse = batched(dims), perhaps(mx.ones((dims,))), random.random() < 0.5
    return lambda: ops.hadamard(x, block, signs, inverse=inverse)


def layer_norm() -> Call:
    dims = number()
    x, weight, bias = batched(dims), perhaps(zeros(dims)), perhaps(zeros(dims))
    return lambda: ops.layer_norm(x, weight, bias, eps=1e-6)


def linear_scan() -> Call:
    batch, length, dims = number(), number(), number()
    f, i = zeros(batch, length, dims), zeros(batch, length, dims)
    return lambda: ops.linear_scan(f, i, mx.zeros((batch, dims)))


def mlgru_step() -> Call:
    batch, length, dims = number(), number(), number()
    gates, state = zeros(batch, length, 3 * dims), mx.zeros((batch, dims))
    options = {"lower_bound": perhaps(zeros(dims)), "valid": perhaps(mx.ones((batch, length)) > 0)}
    return lambda: ops.mlgru_step(gates, state, mx.ones(dims), eps=1e-6, **options)


def rms_norm() -> Call:
    dims = number()
    x, weight = batched(dims), perhaps(zeros(dims))
    return lambda: ops.rms_norm(x, weight, eps=1e-6)


def rms_norm_quantize() -> Call:
    dims, eps = number(), perhaps(1e-6)
    x, weight = batched(dims), perhaps(zeros(dims)) if eps else None
    return lambda: ops.rms_norm_quantize(x, weight, eps=eps)


def rotated_heads() -> Call:
    heads, groups, half = number(), number(), number()
    projected = zeros(number(), number(), (heads + 2 * groups) * 2 * half)
    options = {"num_heads": heads, "num_kv_heads": groups}
    rotation = ops.Rotation.of(number(), projected.shape[1], mx.ones(half))
    return lambda: ops.rotated_heads(projected, rotation, **options)


def ternary_linear() -> Call:
    dims = number()
    x, weight = batched(dims), zeros(number(), dims)
    eps = random.choice([None, 1e-6])
    norm = zeros(dims) if eps is not None and random.random() < 0.5 else None
    return lambda: ops.ternary_linear(x, weight, norm, eps=eps)


def ternary_matmul() -> Call:
    dims = number()
    x, weight = batched(dims), mx.zeros((number(), ops.packed_width(dims)), mx.uint32)
    return lambda: ops.ternary_matmul(x, weight)


CALLS = [
    activate,
    adamw,
    attention,
    attention_step,
    bit_linear,
    cross_entropy,
    dense_matmul,
    depthwise_convolution,
    gated_activation,
    gated_delta_rule,
    gated_linear_attention,
    hadamard,
    layer_norm,
    linear_scan,
    mlgru_step,
    rms_norm,
    rms_norm_quantize,
    rotated_heads,
    ternary_linear,
    ternary_matmul,
]


def variants(results: Any) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    """Shapes and dtypes of results that are never computed."""
    arrays = [results] if isinstance(results, mx.array) else results
    return [(array.shape, array.dtype) for array in arrays]


@pytest.mark.parametrize("draw", CALLS)
def test_shapes_and_dtypes_are_those_of_the_definition(draw: Callable[[], Call]) -> None:
    random.seed(1)
    for _ in range(100):
        call = draw()
        with ops.use_backend("native"):
            got = variants(call())
        with ops.use_backend("reference"):
            assert got == variants(call())


def test_each_operation_is_asked() -> None:
    found = {name for name, operation in operations().items() if "native" in operation.backends}
    assert {call.__name__ for call in CALLS} <= found


@pytest.mark.usefixtures("unfused")
def test_a_shape_may_change_after_a_compiled_function() -> None:
    x, y, weight = mx.ones((2, 3, 40)), mx.ones((5, 1, 40)), mx.ones(40)

    def call(x: mx.array) -> tuple[mx.array, mx.array]:
        return ops.rms_norm_quantize(x, weight, eps=1e-6)

    compiled = mx.compile(call, shapeless=True)
    with ops.use_backend("native"):
        for given in (x, y):
            assert variants(compiled(given)) == variants(call(given))


@pytest.mark.parametrize("sinks", range(4))
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 8])
def test_slots_are_those_of_the_definition(window: int | None, sinks: int) -> None:
    lengths = mx.arange(30)
    used = slots_after(0, 29, window, sinks)
    capacity = used + 1
    projected = mx.ones((30, 1, 3))
    buffers = [mx.zeros((30, 1, capacity, 1)) for _ in range(2)]
    positions = slot_positions(lengths, used, window, sinks).astype(mx.int32)
    options = {"num_heads": 1, "window": window, "sinks": sinks}
    with ops.use_backend("native"):
        _, keys, values, after = ops.attention_step(projected, *buffers, positions, **options)
    slots = mx.arange(capacity) == new_slots(lengths, 1, window, sinks)
    for written in (keys, values):
        assert mx.array_equal(written[:, 0, :, 0], slots.astype(mx.float32))
    count = slots_after(used, 1, window, sinks)
    assert mx.array_equal(after, slot_positions(lengths + 1, count, window, sinks))


def test_an_axis_without_slices_is_not_mapped() -> None:
    with ops.use_backend("native"), pytest.raises(ValueError, match="must not be empty"):
        mx.vmap(lambda x: native.kernels().ternary_matmul(x, mx.zeros((3, 4), mx.uint32), False))(
            mx.zeros((0, 2, 40))
        )


def test_products_of_codes_have_the_gradient_of_the_definition() -> None:
    mx.random.seed(1)
    codes, scales, biases = mx.quantize(mx.random.normal((8, 64)), group_size=32, bits=4)
    x = mx.random.normal((2, 64))

    def loss(*given: mx.array) -> mx.array:
        x, scales, biases = given
        return ops.dense_matmul(x, codes, ops.AffineFormat(scales, biases, 32, 4)).square().sum()

    gradients = []
    for backend in ("native", "reference"):
        with ops.use_backend(backend):
            gradients.append(mx.grad(loss, argnums=(0, 1, 2))(x, scales, biases))
    for argument, (got, want) in enumerate(zip(*gradients, strict=True)):
        assert mx.abs(want).max() > 1, argument
        assert mx.allclose(got, want, rtol=1e-3, atol=1e-2), argument
