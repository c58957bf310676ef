"""Norms of rows: by the root of the mean square, by mean and variance, and one of a gate."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import mlx.core as mx

from .activations import activate
from .backend import launch, self_check
from .backend.cost import Call, Cost, norm_work, work
from .backend.dispatch import FLOATS, Arrays, Backend, Example, Operation, native_kernel, not_floats
from .backend.gradient import with_reference_gradient
from .backend.metal_functions import SIGMOID, SUM_OF_THREADGROUP

_EXAMPLE_DIMS = (32, 4)
"""Arrays of fewer than 8 numbers lie in another address space of Metal."""


def rms_norm(x: mx.array, weight: mx.array | None = None, *, eps: float) -> mx.array:
    r"""Divides each row by the root of its mean square.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}}\,w

    Computed in float32.

    Source: Zhang and Sennrich, arXiv 1910.07467.

    Args:
        x: `(..., D)`, any float dtype.
        weight: Scale, `(D,)`, any float dtype; `None` means ones.
        eps: Is added to the mean square.

    Returns:
        `(..., D)` in the dtype of `x`.

    Raises:
        ValueError: The shapes do not agree, or `D` is zero.

    Example:
        >>> [round(n, 4) for n in rms_norm(mx.array([3.0, 4.0]), eps=0.0).tolist()]
        [0.8485, 1.1314]
    """
    _check_rms(x, weight, eps=eps)
    if x.size == 0:
        return x
    y: mx.array = rms_operation(x, weight, eps=eps)
    return y


def _check_rms(x: mx.array, weight: mx.array | None, *, eps: float) -> None:
    if x.ndim < 1 or not x.shape[-1] or (weight is not None and weight.shape != x.shape[-1:]):
        raise ValueError(
            "[rms_norm] 'x' and 'weight' must have shapes (..., D) and (D,) with D > 0 but got "
            f"{x.shape} and {None if weight is None else weight.shape}."
        )


def rms_reference(x: mx.array, weight: mx.array | None, *, eps: float) -> mx.array:
    """The definition."""
    weight = None if weight is None else weight.astype(mx.float32)
    return mx.fast.rms_norm(x.astype(mx.float32), weight, eps).astype(x.dtype)


def _rms_of_mlx(x: mx.array, weight: mx.array | None, *, eps: float) -> mx.array:
    """MLX's own kernel of a GPU, which rounds once."""
    return mx.fast.rms_norm(x, weight, eps).astype(x.dtype)


def _rms_native(x: mx.array, weight: mx.array | None, *, eps: float) -> mx.array:
    """One pass in C++. Its gradient is a kernel too."""
    y: mx.array = rms_kernel()(x, weight, eps)
    return y


def _rms_gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    x, weight, cotangent, y_scale = arrays
    if y_scale is not None:
        cotangent = cotangent.astype(mx.float32) * y_scale
    # without a weight, the second result is as for ones
    scale = mx.ones(x.shape[-1:]) if weight is None else weight.astype(mx.float32)
    gradients: list[mx.array] = mx.vjp(
        lambda x, scale: rms_reference(x, scale, eps=options[0]), [x, scale], [cotangent]
    )[1]
    return gradients


def layer_norm(
    x: mx.array, weight: mx.array | None = None, bias: mx.array | None = None, *, eps: float
) -> mx.array:
    r"""Takes its mean from each row and divides it by the root of its variance.

    .. math::
        y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}}\,w + b

    Computed in float32.

    Source: Ba, Kiros and Hinton, arXiv 1607.06450.

    Args:
        x: `(..., D)`, any float dtype.
        weight: Scale, `(D,)`, any float dtype; `None` means ones.
        bias: Is added, `(D,)`, any float dtype; `None` means zeros.
        eps: Is added to the variance.

    Returns:
        `(..., D)` in the dtype of `x`.

    Raises:
        ValueError: The shapes do not agree, or `D` is zero.

    Example:
        >>> y = layer_norm(mx.array([1.0, 3.0]), bias=mx.array([10.0, 10.0]), eps=0.0)
        >>> [round(n, 4) for n in y.tolist()]
        [9.0, 11.0]
    """
    given = [array.shape for array in (weight, bias) if array is not None]
    if x.ndim < 1 or not x.shape[-1] or any(shape != x.shape[-1:] for shape in given):
        raise ValueError(
            "[layer_norm] 'x', 'weight' and 'bias' must have shapes (..., D), (D,) and (D,) with D > 0 "
            f"but got {', '.join(map(str, [x.shape, *given]))}."
        )
    if x.size == 0:
        return x
    y: mx.array = _layer(x, weight, bias, eps=eps)
    return y


def _layer_reference(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, *, eps: float
) -> mx.array:
    """The definition."""
    scale, shift = (None if array is None else array.astype(mx.float32) for array in (weight, bias))
    return mx.fast.layer_norm(x.astype(mx.float32), scale, shift, eps).astype(x.dtype)


def _layer_of_mlx(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, *, eps: float
) -> mx.array:
    """MLX's own kernel of a GPU, in the dtype of `x`."""
    scale, shift = (None if array is None else array.astype(x.dtype) for array in (weight, bias))
    return mx.fast.layer_norm(x, scale, shift, eps)


def _layer_native(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, *, eps: float
) -> mx.array:
    """One pass in C++. Its gradient is a kernel too."""
    y: mx.array = _layer_kernel()(x, weight, bias, eps)
    return y


def _layer_gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    x, weight, cotangent = arrays
    dims = x.shape[-1:]
    # without a weight, the second result is as for ones
    scale = mx.ones(dims) if weight is None else weight.astype(mx.float32)
    gradients: list[mx.array] = mx.vjp(
        lambda x, weight, bias: _layer_reference(x, weight, bias, eps=options[0]),
        [x, scale, mx.zeros(dims)],
        [cotangent],
    )[1]
    return gradients


def gated_rms_norm(gate: mx.array, h: mx.array, weight: mx.array, *, eps: float) -> mx.array:
    r"""Multiplies a normed gate by the swish of its input.

    .. math::
        y = \frac{g}{\sqrt{\mathrm{mean}(g^2) + \epsilon}}\,w \odot \mathrm{silu}(h)

    Computed in float32. Source: the output gate of the released MLGRU (arXiv 2406.02528).

    Args:
        gate: `(..., D)`, any float dtype.
        h: What is gated, `(..., D)`, any float dtype.
        weight: Scale of the norm, `(D,)`.
        eps: Epsilon of the norm.

    Returns:
        `(..., D)` in the dtype of `gate`.

    Raises:
        ValueError: The shapes do not agree, or `D` is zero.

    Example:
        >>> y = gated_rms_norm(mx.array([1.0, 1.0]), mx.array([0.0, 2.0]), mx.ones(2), eps=0.0)
        >>> [round(n, 4) for n in y.tolist()]
        [0.0, 1.7616]
    """
    if gate.ndim < 1 or gate.shape != h.shape or weight.shape != gate.shape[-1:] or not weight.size:
        raise ValueError(
            "[gated_rms_norm] 'gate', 'h' and 'weight' must have shapes (..., D), (..., D) and (D,) "
            f"with D > 0 but got {gate.shape}, {h.shape} and {weight.shape}."
        )
    if gate.size == 0:
        return mx.zeros_like(gate)
    y: mx.array = _gated(gate, h, weight, eps=eps)
    return y


def _gated_reference(gate: mx.array, h: mx.array, weight: mx.array, *, eps: float) -> mx.array:
    """The definition."""
    normed = mx.fast.rms_norm(gate.astype(mx.float32), weight.astype(mx.float32), eps)
    return (normed * activate(h.astype(mx.float32), "silu")).astype(gate.dtype)


MAX_THREADS = 512
INPUTS_PER_THREAD = 4


_gated_kernel = mx.fast.metal_kernel(
    name="gated_rms_norm",
    # (rows, D), or (rows, more) of which the last D count, (rows, D), (D,), ()
    input_names=["gate", "h", "weight", "eps"],
    output_names=["out"],  # (rows, D)
    header=SIGMOID + SUM_OF_THREADGROUP,
    source="""
    const uint dims = h_shape[1];
    const uint index = thread_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const uint group = simdgroup_index_in_threadgroup;
    const uint groups = simdgroups_per_threadgroup;
    const size_t row = threadgroup_position_in_grid.x;
    const auto gates = gate + ((row + 1) * gate_shape[1] - dims);
    const auto values = h + row * dims;
    const auto outs = out + row * dims;
    threadgroup float group_squares[32];

    float squares = 0;
    for (uint first = 4 * index; first < dims; first += 128 * groups) {
        #pragma clang loop unroll(full)
        for (uint k = 0; k < 4; k++) {
            if (WHOLE_FOURS || first + k < dims) {
                const float value = static_cast<float>((gates + first)[k]);
                squares += value * value;
            }
        }
    }
    squares = sum_of_threadgroup(squares, group_squares, lane, group, groups);
    const float factor = precise::rsqrt(squares / static_cast<float>(dims) + eps);
    for (uint first = 4 * index; first < dims; first += 128 * groups) {
        float four[4];
        #pragma clang loop unroll(full)
        for (uint n = 0; n < 4; n++) {
            // after the last number the last one
            const uint k = WHOLE_FOURS ? n : min(n, dims - 1 - first);
            const float normed = static_cast<float>((gates + first)[k]) * factor
                * static_cast<float>((weight + first)[k]);
            const float value = static_cast<float>((values + first)[k]);
            four[n] = normed * value * sigmoid(value);
        }
        #pragma clang loop unroll(full)
        for (uint k = 0; k < 4; k++) {
            if (WHOLE_FOURS || first + k < dims) (outs + first)[k] = static_cast<T>(four[k]);
        }
    }
    """,
)


def _gated_unsupported(gate: mx.array, h: mx.array, weight: mx.array, *, eps: float) -> str | None:
    if reason := not_floats(gate, h, weight):
        return reason
    dtypes = {"gate": gate.dtype, "h": h.dtype, "weight": weight.dtype}
    is_whole = h.shape[-1] % INPUTS_PER_THREAD == 0
    return self_check.kernel_fault(
        "gated_rms_norm",
        partial(gated_in_one_launch, eps),
        partial(_gated_definition, eps),
        partial(_gated_inputs, is_whole, **dtypes),
        **dtypes,
        is_whole=is_whole,
    )


def _gated_metal(gate: mx.array, h: mx.array, weight: mx.array, *, eps: float) -> mx.array:
    """One launch with a threadgroup for each row."""
    y: mx.array = _differentiable(eps)(gate, h, weight)
    return y


def _gated_inputs(
    is_whole: bool, gate: mx.Dtype, h: mx.Dtype, weight: mx.Dtype
) -> tuple[mx.array, ...]:
    # more than one SIMD group
    dims = 164 if is_whole else 161
    pattern = mx.arange(2 * dims).reshape(2, dims)
    gates = (pattern * 37 % 101) / 50.0 - 1.0
    values = (pattern * 53 % 97) / 24.0 - 2.0
    return gates.astype(gate), values.astype(h), (pattern[0] % 3 + 1.0).astype(weight)


def _gated_definition(eps: float, *arrays: mx.array) -> mx.array:
    return _gated_reference(*arrays, eps=eps)


def gated_in_one_launch(eps: float, gate: mx.array, h: mx.array, weight: mx.array) -> mx.array:
    """The results, `(..., D)`, for a gate that is the last `D` numbers of each row of `gate`."""
    *leading, dims = h.shape
    rows = h.size // dims
    groups = -(-dims // (launch.SIMD_GROUP * INPUTS_PER_THREAD))
    threads = min(launch.SIMD_GROUP * groups, MAX_THREADS)
    (y,) = launch.launch(
        _gated_kernel,
        inputs=[gate.reshape(rows, -1), h.reshape(rows, dims), weight, mx.array(eps, mx.float32)],
        template=[("T", gate.dtype), ("WHOLE_FOURS", dims % INPUTS_PER_THREAD == 0)],
        grid=(threads * rows, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, dims)],
        output_dtypes=[gate.dtype],
    )
    return y.reshape(*leading, dims)


@cache
def _differentiable(eps: float) -> Callable[..., Any]:
    return with_reference_gradient(
        partial(gated_in_one_launch, eps), partial(_gated_definition, eps)
    )


def _rms_cost(call: Call) -> Cost:
    x, weight = call.arguments
    return Cost(norm_work(x.size // x.shape[-1], x.shape[-1], weight is not None))


def _layer_cost(call: Call) -> Cost:
    x, weight, bias = call.arguments
    rows, dims = x.size // x.shape[-1], x.shape[-1]
    centred = work(add=2 * x.size, other=rows)
    shifted = work() if bias is None else work(add=x.size)
    return Cost(centred + norm_work(rows, dims, weight is not None) + shifted)


def _rms_examples() -> Iterator[Example]:
    for dims, dtype in product(_EXAMPLE_DIMS, FLOATS):
        for weight in (None, mx.ones((dims,), dtype)):
            yield Example((mx.zeros((1, dims), dtype), weight), {"eps": 1e-6})


def _layer_examples() -> Iterator[Example]:
    for dims, dtype in product(_EXAMPLE_DIMS, FLOATS):
        weight = mx.ones((dims,), dtype)
        for given in ((None, None), (weight, weight)):
            yield Example((mx.zeros((1, dims), dtype), *given), {"eps": 1e-6})


def _gated_examples() -> Iterator[Example]:
    for dims, dtype in product((*_EXAMPLE_DIMS, 33), FLOATS):
        x = mx.zeros((1, dims), dtype)
        yield Example((x, x, mx.ones((dims,))), {"eps": 1e-6})


rms_kernel = native_kernel("rms_norm", _rms_gradient)
rms_operation = Operation(
    "rms_norm",
    _rms_examples,
    check=_check_rms,
    costs={"RmsNorm": _rms_cost},
    metal=_rms_of_mlx,
    cuda=_rms_of_mlx,
    native=Backend(_rms_native, not_floats, refuses=True),
    chunked=rms_reference,
    reference=rms_reference,
)
_layer_kernel = native_kernel("layer_norm", _layer_gradient)
_layer = Operation(
    "layer_norm",
    _layer_examples,
    costs={"LayerNorm": _layer_cost},
    metal=_layer_of_mlx,
    cuda=_layer_of_mlx,
    native=Backend(_layer_native, not_floats, refuses=True),
    reference=_layer_reference,
)
_gated = Operation(
    "gated_rms_norm",
    _gated_examples,
    metal=Backend(_gated_metal, _gated_unsupported),
    reference=_gated_reference,
)
