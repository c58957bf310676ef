"""Kernels for NVIDIA GPUs, made of the texts of Metal kernels."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

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
"""CUDA's words for those of Metal, where a threadgroup is a row of threads."""


class CudaKernel:
    """`mx.fast.cuda_kernel`, built when it is launched, since MLX builds none without CUDA.

    MLX keeps compiled kernels by their names alone, so each combination of dtypes, those of the template
    among them, has its own.

    Args:
        name: The beginning of the kernels' names.
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
