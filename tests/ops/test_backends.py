"""Every operation on every backend it has, against the reference: values and all gradients."""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import mlx_mmfree.ops as ops
from mlx_mmfree.errors import BackendError
from mlx_mmfree.ops import pack_ternary, use_backend
from mlx_mmfree.ops.backend.dispatch import operations
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

# sizes are tried in float32; the kernels' own tests try them in each dtype
VARIANTS = [
    *((size, mx.float32) for size in (1, 31, 33, 63, 100)),
    (33, mx.float16),
    (100, mx.bfloat16),
]
# computed as in float32: what is left to see is the dtype of results and gradients
REFERENCE_VARIANTS = VARIANTS[-3:]


class Case(NamedTuple):
    """Makes the arguments of one operation for a size; the first `differentiable` are floats.

    Results are float32, or the first one has the dtype of the arguments if it is kept.
    """

    arguments: Callable[[int, mx.Dtype], tuple[mx.array, ...]]
    call: Callable[..., object]
    differentiable: int
    keeps_dtype: bool = False
    # a GPU computes in the dtype of the arguments
    gpu_keeps_dtype: bool = False


def _normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def _with_float_positions(results: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    return *results[:3], results[3].astype(mx.float32)


CASES = {
    "activate": Case(
        lambda n, dtype: (_normal(5, n, dtype=dtype),),
        lambda x: ops.activate(x, "gelu"),
        1,
        keeps_dtype=True,
    ),
    "cross_entropy": Case(
        lambda n, dtype: (_normal(5, n + 1, dtype=dtype), mx.random.randint(0, n + 1, (5,))),
        ops.cross_entropy,
        1,
    ),
    "dense_matmul": Case(
        lambda n, dtype: (_normal(5, n, dtype=dtype), _normal(33, n, dtype=dtype)),
        ops.dense_matmul,
        2,
        gpu_keeps_dtype=True,
    ),
    # maps smaller and larger than the window, and steps of one position and two
    "depthwise_convolution": Case(
        lambda n, dtype: (
            _normal(2, 3, 5 + n % 9, n, dtype=dtype),
            _normal(n, 5, 5, 1, dtype=dtype),
            _normal(n, dtype=dtype),
        ),
        lambda x, weight, bias: ops.depthwise_convolution(
            x, weight, bias, stride=1 + x.shape[3] % 2
        ),
        3,
        keeps_dtype=True,
    ),
    "layer_norm": Case(
        lambda n, dtype: (
            _normal(5, n, dtype=dtype),
            1.0 + 0.1 * _normal(n, dtype=dtype),
            _normal(n, dtype=dtype),
        ),
        # as for `rms_norm`
        lambda x, weight, bias: ops.layer_norm(x, weight, bias, eps=0.1),
        3,
        keeps_dtype=True,
        gpu_keeps_dtype=True,
    ),
    "linear_scan": Case(
        lambda n, dtype: (
            mx.sigmoid(_normal(3, n, 37, dtype=dtype)),
            _normal(3, n, 37, dtype=dtype),
            _normal(3, 37),
        ),
        ops.linear_scan,
        3,
    ),
    "ternary_matmul": Case(
        lambda n, dtype: (
            _normal(5, n, dtype=dtype),
            pack_ternary(mx.random.randint(-1, 2, (33, n))),
        ),
        ops.ternary_matmul,
        1,
    ),
    "gather_ternary_matmul": Case(
        lambda n, dtype: (
            _normal(5, n, dtype=dtype),
            mx.stack([pack_ternary(mx.random.randint(-1, 2, (33, n))) for _ in range(3)]),
            mx.array([2, 0, 2, 1, 0], mx.uint32),
        ),
        ops.gather_ternary_matmul,
        1,
    ),
    "ternary_linear": Case(
        lambda n, dtype: (
            _normal(5, n, dtype=dtype),
            _normal(33, n, dtype=dtype),
            1.0 + 0.1 * _normal(n, dtype=dtype),
        ),
        # as for `rms_norm`
        lambda x, weight, norm: ops.ternary_linear(
            x, weight, norm, eps=0.1, quantization=ops.Quantization("half_away")
        ),
        3,
        keeps_dtype=True,
        gpu_keeps_dtype=True,
    ),
    "rms_norm": Case(
        lambda n, dtype: (_normal(5, n, dtype=dtype), 1.0 + 0.1 * _normal(n, dtype=dtype)),
        # the norm of one value hardly has a gradient, were this small
        lambda x, weight: ops.rms_norm(x, weight, eps=0.1),
        2,
        keeps_dtype=True,
        gpu_keeps_dtype=True,
    ),
    "rotated_heads": Case(
        lambda n, dtype: (_normal(2, n, 60, dtype=dtype),),
        lambda projected: ops.rotated_heads(
            projected,
            ops.Rotation.of(3, projected.shape[1], mx.power(100.0, mx.arange(5) / 5)),
            num_heads=2,
            num_kv_heads=2,
        ),
        1,
        keeps_dtype=True,
        gpu_keeps_dtype=True,
    ),
    "rms_norm_quantize": Case(
        lambda n, dtype: (_normal(5, n, dtype=dtype), 1.0 + 0.1 * _normal(n, dtype=dtype)),
        # as for `rms_norm`
        lambda x, weight: ops.rms_norm_quantize(x, weight, eps=0.1, rounding="half_away"),
        2,
    ),
    "bit_linear": Case(
        lambda n, dtype: (
            _normal(5, 2 * n, dtype=dtype),
            1.0 + 0.1 * _normal(n),
            _normal(5, 54, dtype=dtype),
            1.0 + 0.1 * _normal(2, n),
            [pack_ternary(mx.random.randint(-1, 2, (outputs, n))) for outputs in (33, 21)],
        ),
        lambda x, norm, residual, norms, weights: ops.bit_linear(
            x,
            [
                ops.Projection(weight, mx.array([0.5]), own)
                for weight, own in zip(weights, norms, strict=True)
            ],
            # a norm of one value hardly has a gradient, were these small
            eps=0.1,
            rounding="half_away",
            gate="silu",
            norm=norm,
            norm_eps=0.2,
            residual=residual,
        ),
        4,
        keeps_dtype=True,
    ),
    "gated_activation": Case(
        lambda n, dtype: (_normal(5, n, dtype=dtype), _normal(5, n, dtype=dtype)),
        lambda gate, up: ops.gated_activation(gate, up, "silu"),
        2,
        keeps_dtype=True,
        gpu_keeps_dtype=True,
    ),
    # a gate for each key channel and removal, or one for each head
    "gated_delta_rule": Case(
        lambda n, dtype: (
            _normal(2, 3, n, 8, dtype=dtype),
            0.3 * _normal(2, 3, n, 8, dtype=dtype),
            _normal(2, 3, n, 5, dtype=dtype),
            mx.sigmoid(_normal(2, 3, n, 1, dtype=dtype)),
            mx.sigmoid(_normal(2, 3, n, 8 if n % 2 else 1, dtype=dtype)),
            _normal(2, 3, 8, 5),
            *(0.3 * _normal(2, 3, n, 8, dtype=dtype) for _ in range(2 if n % 2 else 0)),
        ),
        lambda *arrays: ops.gated_delta_rule(*arrays[:6], removal=arrays[6:] or None),
        6,
        keeps_dtype=True,
    ),
    # a gate for each key channel, or one for each head
    "gated_linear_attention": Case(
        lambda n, dtype: (
            _normal(2, 3, n, 8, dtype=dtype),
            _normal(2, 3, n, 8, dtype=dtype),
            _normal(2, 3, n, 5, dtype=dtype),
            mx.sigmoid(_normal(2, 3, n, 8 if n % 2 else 1, dtype=dtype)),
            _normal(2, 3, 8, 5),
        ),
        ops.gated_linear_attention,
        5,
        keeps_dtype=True,
    ),
    "gated_rms_norm": Case(
        lambda n, dtype: (
            _normal(5, n, dtype=dtype),
            _normal(5, n, dtype=dtype),
            1.0 + 0.1 * _normal(n, dtype=dtype),
        ),
        lambda gate, h, weight: ops.gated_rms_norm(gate, h, weight, eps=1e-6),
        3,
        keeps_dtype=True,
    ),
    "mlgru_step": Case(
        lambda n, dtype: (
            _normal(3, n, 3 * 37, dtype=dtype),
            _normal(3, 37),
            1.0 + 0.1 * _normal(37),
            mx.random.uniform(shape=(37,)),
        ),
        lambda gates, state, weight, lower_bound: ops.mlgru_step(
            gates, state, weight, eps=1e-6, lower_bound=lower_bound
        ),
        4,
        keeps_dtype=True,
    ),
    # more queries than one block
    "attention": Case(
        lambda n, dtype: (
            _normal(2, 4, 3 * n, 8, dtype=dtype),
            _normal(2, 2, 3 * n + 5, 8, dtype=dtype),
            _normal(2, 2, 3 * n + 5, 6, dtype=dtype),
            "causal" if n % 3 else mx.random.uniform(shape=(2, 1, 3 * n, 3 * n + 5)) < 0.9,
        ),
        ops.attention,
        3,
        keeps_dtype=True,
    ),
    # rows of different lengths
    "attention_step": Case(
        lambda n, dtype: (
            _normal(2, 1, 8 * 10, dtype=dtype),
            _normal(2, 2, n + 3, 10, dtype=dtype),
            _normal(2, 2, n + 3, 10, dtype=dtype),
            1.0 + 0.1 * _normal(10),
            1.0 + 0.1 * _normal(10),
            mx.stack([mx.arange(n), mx.where(mx.arange(n) < n // 2, mx.arange(n), -1)]),
        ),
        lambda projected, keys, values, query_norm, key_norm, positions: _with_float_positions(
            ops.attention_step(
                projected,
                keys,
                values,
                positions,
                num_heads=4,
                wavelengths=mx.power(100.0, mx.arange(5) / 5),
                query_norm=query_norm,
                key_norm=key_norm,
                window=None if positions.shape[1] % 3 else 40,
            )
        ),
        5,
        keeps_dtype=True,
    ),
}


def _existing_backends() -> list:
    return [
        pytest.param(
            op, name, *variant, marks=pytest.mark.metal if name in ("metal", "cuda") else ()
        )
        for op in CASES
        for name in operations()[op].backends
        for variant in (REFERENCE_VARIANTS if name == "reference" else VARIANTS)
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("op", operations())
def test_the_examples_of_an_operation_on_its_backends(op: str) -> None:
    """Whatever operation there is, the backends that run here agree on what it declares."""
    operation, examples = operations()[op], 0
    for example in operation.examples():
        if example.rows not in (None, 1, 3):
            continue
        mx.random.seed(examples)
        x, *others = example.args
        if x.size > 2**20:
            # an example of its kernel's text alone
            continue
        # whole numbers, which may be codes
        x = mx.random.randint(0, 3, x.shape).astype(x.dtype)
        args, kwargs = (x, *others), example.kwargs
        want = tree_flatten(operation.backends["reference"].run(*args, **kwargs))
        for name, reason in operation.report(*args, **kwargs).items():
            if reason is None:
                got = tree_flatten(operation.backends[name].run(*args, **kwargs))
                for (_, g), (_, w) in zip(got, want, strict=True):
                    assert (g.shape, g.dtype) == (w.shape, w.dtype), name
                    # a code beside a rounding boundary may be one off
                    assert relative_error(g, w) <= max(TOLERANCE[x.dtype], 1.01 / 127), name
        examples += 1
    assert examples > 0


@pytest.mark.sample(1, of="op")
@pytest.mark.parametrize(("op", "backend", "size", "dtype"), _existing_backends(), ids=str)
def test_backend_equals_reference(
    op: str, backend: str, size: int, dtype: mx.Dtype, request: pytest.FixtureRequest
) -> None:
    if backend in ("metal", "cuda", "chunked"):
        request.getfixturevalue(backend)
    mx.random.seed(size)
    case = CASES[op]
    arguments = case.arguments(size, dtype)

    def loss(*floats: mx.array) -> mx.array:
        results = [r for _, r in tree_flatten(case.call(*floats, *arguments[len(floats) :]))]
        return sum((mx.cos(mx.arange(r.size)).reshape(r.shape) * r).sum() for r in results)

    positions = tuple(range(case.differentiable))
    with use_backend(backend):
        try:
            got = tree_flatten(case.call(*arguments))
        except BackendError as error:
            pytest.skip(str(error))
        got_gradients = mx.grad(loss, argnums=positions)(*arguments[: case.differentiable])
    with use_backend("reference"):
        want = tree_flatten(
            case.call(
                *(a.astype(mx.float32) for a in arguments[: case.differentiable]),
                *arguments[case.differentiable :],
            )
        )
        want_gradients = mx.grad(loss, argnums=positions)(*arguments[: case.differentiable])
    assert got[0][1].dtype == (dtype if case.keeps_dtype else mx.float32)
    for (_, g), (_, w) in zip(got, want, strict=True):
        is_rounded = case.gpu_keeps_dtype and backend in ("metal", "cuda")
        assert relative_error(g, w) <= TOLERANCE[dtype if is_rounded else g.dtype]
    for g, w in zip(got_gradients, want_gradients, strict=True):
        assert relative_error(g, w) <= max(GRADIENT_TOLERANCE, TOLERANCE[dtype])


def test_forced_backend_that_is_absent_raises() -> None:
    with use_backend("metal"), pytest.raises(BackendError, match="'metal' cannot run"):
        ops.ternary_matmul(mx.ones((1, 32)), pack_ternary(mx.zeros((1, 32))))


def test_unknown_backend_lists_the_known() -> None:
    with (
        pytest.raises(ValueError, match="metal, cuda, native, chunked, reference"),
        use_backend("vulkan"),
    ):
        pass


def test_environment_forces_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_MMFREE_BACKEND", "chunked")
    with pytest.raises(BackendError, match="'chunked' cannot run: it is not written"):
        ops.rms_norm_quantize(mx.ones((1, 32)))


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="this machine has a GPU")
def test_a_scan_in_chunks_is_not_chosen_on_a_cpu() -> None:
    arguments = [mx.ones((1, 64, 4))] * 2 + [mx.ones((1, 4))]
    scan = ops.backend_report("mlx_mmfree.ops.linear_scan", *arguments)
    assert scan["chunked"] == "the default device is not a GPU"


def test_use_backend_ends_with_its_block() -> None:
    with use_backend("metal"):
        pass
    assert ops.ternary_matmul(mx.ones((1, 32)), pack_ternary(mx.ones((1, 32)))).item() == 32
