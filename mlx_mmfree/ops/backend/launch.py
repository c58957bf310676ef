"""The one function that launches kernels on a GPU, and what their texts have in common."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import mlx.core as mx

SIMD_GROUP = 32
"""The number of lanes of a SIMD group."""

MAX_GROUP_ROWS = 5
"""The most rows for which a kernel reads each packed word once. More need so many registers that fewer
threads run, and take about as many instructions a row."""

FEW_ROWS = 48
"""The most rows that are computed in groups, each of which reads the packed words again."""


EXAMPLE_ROWS = (*range(1, MAX_GROUP_ROWS + 1), FEW_ROWS + 16)
"""Numbers of rows that select every variant of a product: a group of each size, and tiles."""

_texts: ContextVar[dict[str, str] | None] = ContextVar("texts", default=None)
_is_linked: ContextVar[bool] = ContextVar("is_linked", default=False)


@contextmanager
def recording(*, is_linked: bool = False) -> Iterator[dict[str, str]]:
    """Records the texts of kernels inside the `with` block, where their outputs are zeros.

    Args:
        is_linked: Each launch, and each call of MLX's fast operations, which are one kernel on a GPU,
            stands in the graph as one operation, `Depends`, of its inputs.

    Yields:
        The texts of the kernels that would have run, by their names.
    """
    texts: dict[str, str] = {}
    token, linked = _texts.set(texts), _is_linked.set(is_linked)
    usual = {name: function for name, function in vars(mx.fast).items() if _is_fast(name)}
    try:
        for name, function in usual.items() if is_linked else ():
            setattr(mx.fast, name, partial(_as_one, function))
        yield texts
    finally:
        for name, function in usual.items():
            setattr(mx.fast, name, function)
        _is_linked.reset(linked)
        _texts.reset(token)


def _is_fast(name: str) -> bool:
    """Returns whether a name of `mx.fast` is an operation, and not what makes kernels."""
    return not name.startswith("_") and not name.endswith("_kernel")


def _as_one(function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """A stand-in for the result of one of MLX's fast operations."""
    result = function(*given, **options)
    if not isinstance(result, mx.array):
        return result
    arrays = [each for each in (*given, *options.values()) if isinstance(each, mx.array)]
    return mx.depends(mx.zeros(result.shape, result.dtype), arrays)


def is_recording() -> bool:
    """Returns whether the texts of kernels are recorded."""
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
        zeros = [mx.zeros(*variant) for variant in zip(output_shapes, output_dtypes, strict=True)]
        return list(mx.depends(zeros, list(inputs))) if _is_linked.get() else zeros
    outputs: list[mx.array] = kernel(inputs=list(inputs), **call)
    return outputs


_WORDS = {
    "thread_index_in_simdgroup": "threadIdx.x % 32",
    "simdgroup_index_in_threadgroup": "threadIdx.x / 32",
    "simdgroups_per_threadgroup": "blockDim.x / 32",
    "threadgroup_position_in_grid": "blockIdx",
    "threadgroup_barrier(mem_flags::mem_threadgroup)": "__syncthreads()",
    "threadgroup float": "__shared__ float",
    # MLX puts kernels into a namespace of its own
    " min(": " ::min(",
}
"""CUDA's words in place of Metal's, where a threadgroup is a row of threads."""


class CudaKernel:
    """`mx.fast.cuda_kernel`, built when it is launched, since MLX builds none without CUDA.

    MLX keeps compiled kernels by their names alone, so each combination of dtypes, including the
    template's, has its own.

    Args:
        name: The prefix of the kernels' names.
        source: The text of the kernel's body.
        text: The other arguments of `mx.fast.cuda_kernel`.
    """

    def __init__(self, name: str, source: str, **text: Any):
        self.name, self.source, self.text = name, source, text
        self._built: dict[str, Any] = {}

    @classmethod
    def of_metal(cls, name: str, source: str, **text: Any) -> "CudaKernel":
        """The CUDA kernel that does what a Metal kernel with this text does.

        The words in `_WORDS` are translated. Metal and CUDA must have the others in common, as they have
        `<name>_shape` of an input.
        """
        for metal, cuda in _WORDS.items():
            source = source.replace(metal, cuda)
        return cls(name, source, **text)

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, Any]] | None = None,
        **call: Any,
    ) -> list[mx.array]:
        selected = [*(x.dtype for x in inputs), *(value for _, value in template or ())]
        name = "_".join([self.name, *(str(each).rpartition(".")[2] for each in selected)])
        if name not in self._built:
            self._built[name] = mx.fast.cuda_kernel(name=name, source=self.source, **self.text)
        outputs: list[mx.array] = self._built[name](inputs=inputs, template=template, **call)
        return outputs
