"""`depthwise_convolution` on Metal in one launch. The gradient is that of the definition.

A SIMD group computes a few neighbouring places of a row in 32 channels, and reads each place of its
windows once for all of them. Its threadgroup holds the weights of these channels.
"""

import math
from typing import Any

import mlx.core as mx

from ..backend import launch
from ..backend.gradient import with_reference_gradient
from ..backend.self_check import kernel_fault
from . import reference

TILE = 4
"""Neighbouring places that a thread computes."""

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
        // with known places of `sums`, which then stay in registers
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

_kernel = mx.fast.metal_kernel(
    name="depthwise_convolution",
    # (B, H, W, D), (D, k, k, 1), (D,)
    input_names=["x", "weight", "bias"],
    output_names=["y"],  # (B, H / stride, W / stride, D)
    source=_SOURCE,
)


def unsupported(x: mx.array, weight: mx.array, bias: mx.array | None, stride: int) -> str | None:
    if reason := launch.not_floats(x, weight, bias):
        return reason
    side = weight.shape[1]
    if side > MAX_SIDE:
        return f"it takes windows of up to {MAX_SIDE} x {MAX_SIDE} places"
    dtypes: dict[str, Any] = {"x": x.dtype, "weight": weight.dtype}
    dtypes["bias"] = None if bias is None else bias.dtype
    return kernel_fault(
        "depthwise_convolution",
        lambda x, weight, bias: _convolved(x, weight, bias, stride),
        lambda x, weight, bias: reference.run(x, weight, bias, stride),
        lambda: _check_inputs(side, stride, **dtypes),
        **dtypes,
        side=side,
        stride=stride,
    )


def run(x: mx.array, weight: mx.array, bias: mx.array | None, stride: int) -> mx.array:
    shift = mx.zeros(x.shape[3:]) if bias is None else bias
    convolve = with_reference_gradient(
        lambda x, weight, bias: _convolved(x, weight, bias, stride),
        lambda x, weight, bias: reference.run(x, weight, bias, stride),
    )
    y: mx.array = convolve(x, weight, shift)
    return y


def _convolved(x: mx.array, weight: mx.array, bias: mx.array, stride: int) -> mx.array:
    batch, height, width, dims = x.shape
    rows, columns = -(-height // stride), -(-width // stride)
    threads = launch.SIMD_GROUP * GROUPS
    template = {"SIDE": weight.shape[1], "STRIDE": stride, "TILE": TILE, "GROUPS": GROUPS}
    (y,) = launch.launch(
        _kernel,
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
    places = (mx.arange(math.prod(shape)).reshape(shape) * 37 % 101) / 101.0 - 0.5
    windows = (mx.arange(dims * side * side).reshape(dims, side, side, 1) * 53 % 97) / 97.0 - 0.5
    shift = mx.arange(dims) / dims
    return places.astype(x), windows.astype(weight), shift.astype(bias or mx.float32)
