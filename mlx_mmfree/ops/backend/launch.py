"""The one place from which kernels are launched on Metal."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..float_dtypes import FLOATS

SIMD_GROUP = 32
"""Number of lanes of a SIMD group."""


def not_floats(*arrays: mx.array | None) -> str | None:
    """Returns why kernels cannot take these arrays, or None if all are floats."""
    for array in arrays:
        if array is not None and array.dtype not in FLOATS:
            return f"it takes float32, float16 or bfloat16, not {array.dtype}"
    return None


def launch(
    kernel: Any,
    *,
    inputs: Sequence[mx.array],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, int | bool | mx.Dtype]] = (),
    init_value: float | None = None,
) -> list[mx.array]:
    """Launches a kernel.

    Args:
        kernel: What `mx.fast.metal_kernel` returned.
        inputs: One array for each of the kernel's inputs.
        grid: Number of threads in each direction.
        threadgroup: Number of threads of a threadgroup in each direction.
        output_shapes: One shape for each of the kernel's outputs.
        output_dtypes: The dtype of each output.
        template: Name and value of each template parameter.
        init_value: What the outputs hold before the kernel runs; by default they are not set.

    Returns:
        The outputs.
    """
    outputs: list[mx.array] = kernel(
        inputs=list(inputs),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=list(output_shapes),
        output_dtypes=list(output_dtypes),
        template=list(template) or None,
        init_value=init_value,
    )
    return outputs
