"""The convolution of each channel of a map by itself (as in Chollet, arXiv 1610.02357)."""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import mlx.core as mx

from .backend import launch, self_check
from .backend.cost import Call, Cost, product_work, work
from .backend.dispatch import FLOATS, Arrays, Backend, Example, Operation, native_kernel, not_floats
from .backend.gradient import with_reference_gradient


def depthwise_convolution(
    x: mx.array, weight: mx.array, bias: mx.array | None = None, *, stride: int = 1
) -> mx.array:
    r"""Convolves each channel with a window of its own, around every position or every `s`-th.

    .. math::
        y_{i,j,c} = b_c + \sum_{u,v} w_{c,u,v}\,
        x_{s i+u-\lfloor k/2 \rfloor,\,s j+v-\lfloor k/2 \rfloor,\,c}

    with zeros beyond the map. Computed in float32. On the CPU, the gradients of the weight and of the
    bias are sums in float64 of sums over few positions.

    Source: as in Chollet, arXiv 1610.02357.

    Args:
        x: Maps `(B, H, W, D)`, any float dtype.
        weight: Windows `(D, k, k, 1)` with `k` odd, any float dtype.
        bias: :math:`b`, `(D,)`, any float dtype; `None` means zeros.
        stride: :math:`s`.

    Returns:
        `(B, H / s, W / s, D)`, rounded up, in the dtype of `x`.

    Raises:
        ValueError: A shape does not fit, or the stride is not positive.

    Example:
        >>> x, weight = mx.ones((1, 3, 3, 1)), mx.ones((1, 3, 3, 1))
        >>> depthwise_convolution(x, weight)[0, :, :, 0].tolist()
        [[4.0, 6.0, 4.0], [6.0, 9.0, 6.0], [4.0, 6.0, 4.0]]
        >>> depthwise_convolution(x, weight, stride=2).shape
        (1, 2, 2, 1)
    """
    _check(x, weight, bias, stride)
    if x.size == 0:
        batch, height, width, dims = x.shape
        return mx.zeros((batch, -(-height // stride), -(-width // stride), dims), x.dtype)
    y: mx.array = _operation(x, weight, bias, stride)
    return y


def _check(x: mx.array, weight: mx.array, bias: mx.array | None, stride: int) -> None:
    side = weight.shape[1] if weight.ndim == 4 else 0
    if x.ndim != 4 or side % 2 == 0 or weight.shape != (x.shape[3], side, side, 1):
        raise ValueError(
            "[depthwise_convolution] 'x' and 'weight' must have shapes (B, H, W, D) and (D, k, k, 1) "
            f"with k odd but got {x.shape} and {weight.shape}."
        )
    if bias is not None and bias.shape != x.shape[3:]:
        raise ValueError(
            f"[depthwise_convolution] 'bias' must have shape {x.shape[3:]} but got {bias.shape}."
        )
    if stride < 1:
        raise ValueError(f"[depthwise_convolution] 'stride' must be positive but got {stride}.")


def _reference(x: mx.array, weight: mx.array, bias: mx.array | None, stride: int) -> mx.array:
    """The definition: MLX's convolution with a group for each channel."""
    dims, side = weight.shape[:2]
    values, windows = x.astype(mx.float32), weight.astype(mx.float32)
    y = mx.conv2d(values, windows, stride=stride, padding=side // 2, groups=dims)
    return (y if bias is None else y + bias.astype(mx.float32)).astype(x.dtype)


def _native(x: mx.array, weight: mx.array, bias: mx.array | None, stride: int) -> mx.array:
    """C++ that takes many channels at once. Its gradient is a kernel too."""
    y: mx.array = _kernel()(x, weight, bias, stride)
    return y


def _gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    x, weight, cotangent = arrays
    stride, wants_x, wants_weight = options
    given = [x, weight.astype(mx.float32), mx.zeros(x.shape[-1:])]
    gradients: list[mx.array] = mx.vjp(
        lambda x, weight, bias: _reference(x, weight, bias, stride), given, [cotangent]
    )[1]
    return (gradients[:1] if wants_x else []) + (gradients[1:] if wants_weight else [])


TILE = 4
"""Neighbouring positions that a thread computes."""


GROUPS = 8
"""SIMD groups of a threadgroup."""


MAX_SIDE = 15
"""The largest side of a window, whose weights of 32 channels fill the memory of a threadgroup."""


_SOURCE = """
    const int height = x_shape[1];
    const int width = x_shape[2];
    const int dims = x_shape[3];
    const int rows = (height + STRIDE - 1) / STRIDE;
    const int columns = (width + STRIDE - 1) / STRIDE;
    const int lane = thread_index_in_simdgroup;
    const int group = simdgroup_index_in_threadgroup;
    const int block = threadgroup_position_in_grid.x * 32;
    const int channel = block + lane;
    threadgroup float weights[32 * SIDE * SIDE];

    const int taps = min(32, dims - block) * SIDE * SIDE;
    for (int i = group * 32 + lane; i < taps; i += GROUPS * 32) {
        weights[i] = static_cast<float>(weight[static_cast<size_t>(block) * SIDE * SIDE + i]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const int across = (columns + TILE - 1) / TILE;
    const int tile = threadgroup_position_in_grid.y * GROUPS + group;
    if (tile >= rows * across || channel >= dims) return;
    const int row = tile / across;
    const int column = tile % across * TILE;
    const size_t image = threadgroup_position_in_grid.z;

    float sums[TILE];
    #pragma clang loop unroll(full)
    for (int t = 0; t < TILE; t++) sums[t] = static_cast<float>(bias[channel]);
    for (int u = 0; u < SIDE; u++) {
        const int above = row * STRIDE + u - SIDE / 2;
        if (above < 0 || above >= height) continue;
        const size_t origin = (image * height + above) * width * dims + channel;
        // with known indices of `sums`, which then stay in registers
        #pragma clang loop unroll(full)
        for (int p = 0; p < (TILE - 1) * STRIDE + SIDE; p++) {
            const int beside = column * STRIDE + p - SIDE / 2;
            if (beside < 0 || beside >= width) continue;
            const float value = static_cast<float>(x[origin + static_cast<size_t>(beside) * dims]);
            #pragma clang loop unroll(full)
            for (int t = 0; t < TILE; t++) {
                const int v = p - t * STRIDE;
                if (v >= 0 && v < SIDE) {
                    sums[t] += weights[(lane * SIDE + u) * SIDE + v] * value;
                }
            }
        }
    }
    const size_t place = (image * rows + row) * columns + column;
    #pragma clang loop unroll(full)
    for (int t = 0; t < TILE; t++) {
        if (t < columns - column) y[(place + t) * dims + channel] = static_cast<T>(sums[t]);
    }
"""


_metal_kernel = mx.fast.metal_kernel(
    name="depthwise_convolution",
    # (B, H, W, D), (D, k, k, 1), (D,)
    input_names=["x", "weight", "bias"],
    output_names=["y"],  # (B, H / stride, W / stride, D)
    source=_SOURCE,
)


def _metal_unsupported(
    x: mx.array, weight: mx.array, bias: mx.array | None, stride: int
) -> str | None:
    if reason := not_floats(x, weight, bias):
        return reason
    side = weight.shape[1]
    if side > MAX_SIDE:
        return f"it takes windows of up to {MAX_SIDE} x {MAX_SIDE} positions"
    dtypes: dict[str, Any] = {"x": x.dtype, "weight": weight.dtype}
    dtypes["bias"] = None if bias is None else bias.dtype
    return self_check.kernel_fault(
        "depthwise_convolution",
        lambda x, weight, bias: _convolved(x, weight, bias, stride),
        lambda x, weight, bias: _reference(x, weight, bias, stride),
        lambda: _check_inputs(side, stride, **dtypes),
        **dtypes,
        side=side,
        stride=stride,
    )


def _metal(x: mx.array, weight: mx.array, bias: mx.array | None, stride: int) -> mx.array:
    """One launch. The gradient is the definition's.

    A SIMD group computes a few neighbouring positions of a row in 32 channels, and reads each position
    of its windows once for all of them. Its threadgroup holds the weights of these channels.
    """
    shift = mx.zeros(x.shape[3:]) if bias is None else bias
    convolve = with_reference_gradient(
        lambda x, weight, bias: _convolved(x, weight, bias, stride),
        lambda x, weight, bias: _reference(x, weight, bias, stride),
    )
    y: mx.array = convolve(x, weight, shift)
    return y


def _convolved(x: mx.array, weight: mx.array, bias: mx.array, stride: int) -> mx.array:
    batch, height, width, dims = x.shape
    rows, columns = -(-height // stride), -(-width // stride)
    threads = launch.SIMD_GROUP * GROUPS
    template = {"SIDE": weight.shape[1], "STRIDE": stride, "TILE": TILE, "GROUPS": GROUPS}
    (y,) = launch.launch(
        _metal_kernel,
        inputs=[x, weight, bias],
        template=[("T", x.dtype), *template.items()],
        grid=(
            -(-dims // launch.SIMD_GROUP) * threads,
            -(-rows * -(-columns // TILE) // GROUPS),
            batch,
        ),
        threadgroup=(threads, 1, 1),
        output_shapes=[(batch, rows, columns, dims)],
        output_dtypes=[x.dtype],
    )
    return y


def _check_inputs(
    side: int, stride: int, x: mx.Dtype, weight: mx.Dtype, bias: mx.Dtype | None
) -> tuple[mx.array, ...]:
    # a whole tile and a part of one, and more than one SIMD group of channels
    dims = launch.SIMD_GROUP + 1
    shape = (2, 3, TILE * stride + 1, dims)
    numbers = (mx.arange(math.prod(shape)).reshape(shape) * 37 % 101) / 101.0 - 0.5
    windows = (mx.arange(dims * side * side).reshape(dims, side, side, 1) * 53 % 97) / 97.0 - 0.5
    shift = mx.arange(dims) / dims
    return numbers.astype(x), windows.astype(weight), shift.astype(bias or mx.float32)


def _cost(call: Call) -> Cost:
    _, weight, bias = call.arguments
    y = call.outputs[0]
    window = weight.size // weight.shape[0]
    shifted = work() if bias is None else work(add=y.size)
    return Cost(product_work(y.size * window) + shifted)


def _examples() -> Iterator[Example]:
    for stride, dtype in product((1, 2), FLOATS):
        x, weight = mx.zeros((1, 2, 2, 32), dtype), mx.zeros((32, 3, 3, 1), dtype)
        for bias in (None, mx.zeros((32,), dtype)):
            yield Example((x, weight, bias, stride))


_kernel = native_kernel("depthwise_convolution", _gradient)
_operation = Operation(
    "depthwise_convolution",
    _examples,
    costs={"DepthwiseConvolution": _cost},
    metal=Backend(_metal, _metal_unsupported),
    native=Backend(_native, not_floats, refuses=True),
    reference=_reference,
)
