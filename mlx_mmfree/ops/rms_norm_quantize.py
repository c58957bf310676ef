"""RMS normalisation followed by 8-bit quantisation per token."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any, Literal, get_args

import mlx.core as mx

from .backend import launch, self_check
from .backend.cost import Call, Cost, Work, norm_work, work
from .backend.dispatch import FLOATS, Backend, Example, Operation, native_kernel, not_floats
from .backend.gradient import with_reference_gradient
from .backend.metal_functions import QUANTIZE
from .norms import rms_kernel
from .ternary import straight_through

Rounding = Literal["half_even", "half_away"]


def rms_norm_quantize(
    x: mx.array,
    weight: mx.array | None = None,
    *,
    eps: float | None = None,
    rounding: Rounding = "half_even",
) -> tuple[mx.array, mx.array]:
    r"""Quantises each token to 8-bit codes, after an RMSNorm if `eps` is given.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}}\,w, \quad
        s = \frac{127}{\max(\max|y|, 10^{-5})}, \quad
        q = \mathrm{clip}(\mathrm{round}(y s), -128, 127)

    The gradient is straight-through, which is the gradient of `y * s` with `s` held constant. Sources:
    arXiv 2402.17764 eq. 4-5 (ties to even), and arXiv 2406.02528 sec. 3.2 with its released kernel (norm
    inside, ties away from zero).

    Args:
        x: Activations `(..., D)`, any float dtype; computed in float32.
        weight: Scale of the norm, `(D,)`. Only with `eps`.
        eps: Epsilon of the norm, or `None` for no norm.
        rounding: Where exact ties go: `"half_even"` to even, or `"half_away"` away from zero.

    Returns:
        The codes, whole numbers in float32 `(..., D)`, and `s`, float32 `(..., 1)`.

    Raises:
        ValueError: `rounding` is unknown, `weight` is given without `eps`, or `D` is zero.

    Example:
        >>> codes, scale = rms_norm_quantize(mx.array([0.5, -1.0, 0.25]))
        >>> codes.tolist(), scale.tolist()
        ([64.0, -127.0, 32.0], [127.0])
    """
    if x.ndim < 1 or x.shape[-1] == 0:
        raise ValueError(
            f"[rms_norm_quantize] 'x' must have one value a row at least but got shape {x.shape}."
        )
    if rounding not in get_args(Rounding):
        raise ValueError(
            f"[rms_norm_quantize] 'rounding' must be one of {', '.join(get_args(Rounding))} but got "
            f"'{rounding}'."
        )
    if weight is not None and eps is None:
        raise ValueError("[rms_norm_quantize] 'eps' must be given with 'weight' but got None.")
    if x.size == 0:
        return mx.zeros(x.shape), mx.zeros((*x.shape[:-1], 1))
    codes, scale = _operation(x, weight, eps=eps, rounding=rounding)
    return codes, scale


# The float32 just below 0.5. Added to |x| before the floor, it rounds ties away from zero but does not
# round 0.49999997 up.
BELOW_HALF = 0.49999997


def normed(x: mx.array, weight: mx.array | None, eps: float | None) -> mx.array:
    """The input of the quantiser, float32 `(..., D)`."""
    y = x.astype(mx.float32)
    if eps is None:
        return y
    return mx.fast.rms_norm(y, None if weight is None else weight.astype(mx.float32), eps)


def reference(
    x: mx.array, weight: mx.array | None, *, eps: float | None, rounding: str
) -> tuple[mx.array, mx.array]:
    """The definition in plain operations."""
    y = normed(x, weight, eps)
    largest = mx.max(mx.abs(mx.stop_gradient(y)), axis=-1, keepdims=True)
    scale = 127.0 / mx.maximum(largest, 1e-5)
    scaled = y * scale
    if rounding == "half_away":
        rounded = mx.sign(scaled) * mx.floor(mx.abs(scaled) + BELOW_HALF)
    else:
        rounded = mx.round(scaled)
    return straight_through(mx.clip(rounded, -128.0, 127.0), scaled), scale


def native(
    x: mx.array, weight: mx.array | None, *, eps: float | None, rounding: str
) -> tuple[mx.array, mx.array]:
    # the gradient is the norm's, which knows its definition once it is loaded
    """C++, in which a row is read and written once. So is it in the gradient."""
    rms_kernel()
    x = x if x.dtype in FLOATS else x.astype(mx.float32)
    weight = None if weight is None else weight.astype(mx.float32)
    codes, scale = _kernel()(x, weight, eps, rounding == "half_away")
    return codes, scale


MAX_THREADS = 512
INPUTS_PER_THREAD = 4


_metal_kernel = mx.fast.metal_kernel(
    name="rms_norm_quantize",
    input_names=["x", "weight", "eps"],  # (rows, D), (D,) if WEIGHTED, ()
    output_names=["codes", "scale"],  # (rows, D), (rows, 1)
    header=QUANTIZE,
    source="""
    const uint dims = x_shape[1];
    const uint index = thread_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const uint group = simdgroup_index_in_threadgroup;
    const uint groups = simdgroups_per_threadgroup;
    const uint row = threadgroup_position_in_grid.x;
    const size_t start = static_cast<size_t>(row) * dims;
    threadgroup float group_squares[16];
    threadgroup float group_largest[16];

    const auto inputs = x + start;
    const auto row_codes = codes + start;
    float squares = 0;
    float largest = 0;
    for (uint first = 4 * index; first < dims; first += 128 * groups) {
        #pragma clang loop unroll(full)
        for (uint k = 0; k < 4; k++) {
            if (WHOLE_FOURS || first + k < dims) {
                float value = static_cast<float>((inputs + first)[k]);
                squares += value * value;
                if (WEIGHTED) value *= static_cast<float>((weight + first)[k]);
                largest = max(largest, abs(value));
            }
        }
    }
    squares = simd_sum(squares);
    largest = simd_max(largest);
    if (lane == 0) {
        group_squares[group] = squares;
        group_largest[group] = largest;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    squares = simd_sum(lane < groups ? group_squares[lane] : 0.0f);
    largest = simd_max(lane < groups ? group_largest[lane] : 0.0f);

    const float factor = NORM ? precise::rsqrt(squares / static_cast<float>(dims) + eps) : 1.0f;
    // the largest value passes over NaN
    const float row_scale = scale_of_codes(isnan(squares) ? squares : largest * factor);
    for (uint first = 4 * index; first < dims; first += 128 * groups) {
        float four[4];
        #pragma clang loop unroll(full)
        for (uint n = 0; n < 4; n++) {
            // after the last input the last one again
            const uint k = WHOLE_FOURS ? n : min(n, dims - 1 - first);
            float value = static_cast<float>((inputs + first)[k]) * factor;
            if (WEIGHTED) value *= static_cast<float>((weight + first)[k]);
            // the largest one becomes 127, so that none need be clipped
            four[n] = rounded(value * row_scale, HALF_AWAY);
        }
        #pragma clang loop unroll(full)
        for (uint k = 0; k < 4; k++) {
            if (WHOLE_FOURS || first + k < dims) (row_codes + first)[k] = four[k];
        }
    }
    if (index == 0) scale[row] = row_scale;
    """,
)


def _metal_unsupported(
    x: mx.array, weight: mx.array | None, *, eps: float | None, rounding: str
) -> str | None:
    if reason := not_floats(x, weight):
        return reason
    is_whole = x.shape[-1] % INPUTS_PER_THREAD == 0
    return self_check.kernel_fault(
        "rms_norm_quantize",
        partial(_codes, eps, rounding),
        partial(_reference, eps, rounding),
        lambda: _check_inputs(x.dtype, None if weight is None else weight.dtype, is_whole),
        x=x.dtype,
        norm=eps is not None,
        weight=None if weight is None else weight.dtype,
        rounding=rounding,
        is_whole=is_whole,
    )


def _metal(
    x: mx.array, weight: mx.array | None, *, eps: float | None, rounding: str
) -> tuple[mx.array, mx.array]:
    """One launch with a threadgroup for each row."""
    function = _differentiable(eps, rounding)
    codes, scale = function(x) if weight is None else function(x, weight)
    return codes, scale


def _check_inputs(
    dtype: mx.Dtype, weight_dtype: mx.Dtype | None, is_whole: bool
) -> tuple[mx.array, ...]:
    # with whole numbers up to 127 and no norm the scale is 1, so that ties stay ties
    dims = 132 if is_whole else 129
    x = (mx.arange(2 * dims) * 37 % 255 - 127).astype(mx.float32).reshape(2, dims)
    x[:, 2:4] = mx.array([0.5, -2.5])
    if weight_dtype is None:
        return (x.astype(dtype),)
    return x.astype(dtype), mx.full((dims,), 2.0, weight_dtype)


def _reference(
    eps: float | None, rounding: str, x: mx.array, weight: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    return reference(x, weight, eps=eps, rounding=rounding)


def _codes(
    eps: float | None, rounding: str, x: mx.array, weight: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    *leading, dims = x.shape
    rows = x.size // dims
    groups = -(-dims // (launch.SIMD_GROUP * INPUTS_PER_THREAD))
    threads = min(launch.SIMD_GROUP * groups, MAX_THREADS)
    codes, scale = launch.launch(
        _metal_kernel,
        inputs=[
            x.reshape(rows, dims),
            mx.array([1.0]) if weight is None else weight,
            mx.array(eps or 0.0, mx.float32),
        ],
        template=[
            ("NORM", eps is not None),
            ("WEIGHTED", weight is not None),
            ("HALF_AWAY", rounding == "half_away"),
            ("WHOLE_FOURS", dims % INPUTS_PER_THREAD == 0),
        ],
        grid=(threads * rows, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, dims), (rows, 1)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return codes.reshape(x.shape), scale.reshape(*leading, 1)


@cache
def _differentiable(eps: float | None, rounding: str) -> Callable[..., Any]:
    return with_reference_gradient(
        partial(_codes, eps, rounding), partial(_reference, eps, rounding)
    )


def codes_work(rows: int, dims: int) -> Work:
    """Magnitudes, the largest, the scale, and codes that are rounded and kept in bounds."""
    return work(multiply=rows * dims, other=rows * (4 * dims + 1))


def _cost(call: Call) -> Cost:
    x, weight = call.arguments
    rows, dims = x.size // x.shape[-1], x.shape[-1]
    norm = work() if call.options[0] is None else norm_work(rows, dims, weight is not None)
    return Cost(norm + codes_work(rows, dims))


def _examples() -> Iterator[Example]:
    # arrays of fewer than 8 numbers lie in another address space of Metal
    for dims, dtype, rounding in product((32, 4, 33), FLOATS, get_args(Rounding)):
        x = mx.zeros((1, dims), dtype)
        yield Example((x, None), {"eps": None, "rounding": rounding})
        yield Example((x, mx.ones((dims,), dtype)), {"eps": 1e-6, "rounding": rounding})


_kernel = native_kernel("rms_norm_quantize")
_operation = Operation(
    "rms_norm_quantize",
    _examples,
    costs={"RmsNormQuantize": _cost},
    metal=Backend(_metal, _metal_unsupported),
    native=native,
    reference=reference,
)
