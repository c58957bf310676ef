"""The one place from which kernels are launched on Metal."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx

from ..float_dtypes import FLOATS

SIMD_GROUP = 32
"""The number of lanes of a SIMD group."""

MAX_GROUP_ROWS = 4
"""The most rows for which a kernel reads each packed word once. More need so many registers that fewer
threads run, and take about as many instructions a row."""

FEW_ROWS = 48
"""The most rows that are computed in groups, each of which reads the packed words again."""


_texts: ContextVar[dict[str, str] | None] = ContextVar("texts", default=None)
_is_linked: ContextVar[bool] = ContextVar("is_linked", default=False)


@contextmanager
def recording(*, is_linked: bool = False) -> Iterator[dict[str, str]]:
    """Records the texts of kernels inside the `with` block, where their outputs are zeros.

    Args:
        is_linked: Each launch stands in the graph as one operation, `Depends`, of the kernel's inputs.

    Yields:
        The texts of the kernels that would have run, by their names.
    """
    texts: dict[str, str] = {}
    token, linked = _texts.set(texts), _is_linked.set(is_linked)
    try:
        yield texts
    finally:
        _is_linked.reset(linked)
        _texts.reset(token)


def is_recording() -> bool:
    """Whether the texts of kernels are recorded."""
    return _texts.get() is not None


def generated_text(kernel: Any, inputs: Sequence[mx.array], **call: Any) -> tuple[str, str]:
    """The name and text of what MLX would have Metal compile for a call. No device is needed.

    Args:
        kernel: What `mx.fast.metal_kernel` returned.
        inputs: Arrays with the shapes and dtypes of the call.
        call: The kernel's other arguments.
    """
    found: list[tuple[str, str]] = []

    def collect(event: dict[str, Any]) -> None:
        if event["type"] == "primitive" and event["name"] == "CustomKernel":
            found.append(tuple(event["arguments"][:2]))

    shapes = [mx.zeros(x.shape, x.dtype) for x in inputs]
    mx.export_function(collect, lambda *arrays: kernel(inputs=list(arrays), **call), *shapes)
    return found[0]


def rows_of_a_group(rows: int) -> int:
    """The rows of a group, so that groups are as few and of sizes as even as they can be."""
    return -(-rows // -(-rows // MAX_GROUP_ROWS))


def not_floats(*arrays: mx.array | None) -> str | None:
    """Returns why kernels cannot take these arrays, or `None` if all are floats."""
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
        grid: The number of threads in each direction.
        threadgroup: The number of threads of a threadgroup in each direction.
        output_shapes: One shape for each of the kernel's outputs.
        output_dtypes: The dtype of each output.
        template: The name and value of each template parameter.
        init_value: What the outputs hold before the kernel runs, or `None` to leave them unset.

    Returns:
        The outputs.
    """
    call: dict[str, Any] = {
        "grid": grid,
        "threadgroup": threadgroup,
        "output_shapes": list(output_shapes),
        "output_dtypes": list(output_dtypes),
        "template": list(template) or None,
        "init_value": init_value,
    }
    if (texts := _texts.get()) is not None:
        name, text = generated_text(kernel, inputs, **call)
        texts[name] = text
        zeros = [mx.zeros(*form) for form in zip(output_shapes, output_dtypes, strict=True)]
        return list(mx.depends(zeros, list(inputs))) if _is_linked.get() else zeros
    outputs: list[mx.array] = kernel(inputs=list(inputs), **call)
    return outputs
