"""Which operations a graph of MLX is made of."""

import io
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_mmfree.ops.backend.graph import dispatches

VIEWS = {
    *("Broadcast", "ExpandDims", "Flatten", "Full", "Reshape", "Slice", "Split", "Squeeze"),
    *("StopGradient", "Transpose", "Unflatten", "CustomTransforms"),
}
"""Operations that compute nothing: another look at an array, or a number."""


def operations(result: Any) -> Counter[str]:
    """How often each operation stands in the graph of arrays that are yet to be computed.

    What MLX has fused counts as the operations that it is made of, so that it does not matter whether
    fusing is on.
    """
    found: Counter[str] = Counter()
    for name, _ in _nodes(result):
        is_fused = name.startswith("Compiled")
        found.update(re.findall("[A-Z][a-z]+", name)[1:] if is_fused else [name])
    return Counter({name: count for name, count in found.items() if name not in VIEWS})


def launches(result: Any) -> Counter[str]:
    """The kernels that a GPU launches for each operation of such a graph; what MLX has fused is one."""
    found: Counter[str] = Counter()
    for name, inputs in _nodes(result):
        if name not in VIEWS:
            found[name] += dispatches(name, inputs)
    return found


def _nodes(result: Any) -> list[tuple[str, int]]:
    """The operations of a graph, each with the number of its inputs."""
    text = io.StringIO()
    mx.export_to_dot(text, *(array for _, array in tree_flatten(result)))
    inputs = Counter(re.findall(r'"[A-Z]+" -> (\d+)', text.getvalue()))
    names = re.findall(r'(\d+) \[label ?= ?"([A-Za-z]+)"', text.getvalue())
    return [(name, inputs[index]) for index, name in names]


def stand_in(shapes: list[Any], dtypes: list[mx.Dtype], *inputs: Any) -> list[mx.array]:
    """Zeros that one operation, named `Depends`, makes of all inputs that are arrays."""
    arrays = [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return list(mx.depends(arrays, [array for array in inputs if isinstance(array, mx.array)]))


def _one_operation(shape: Any, floats: list[mx.array], *others: Any) -> mx.array:
    """A stand-in of the dtype of the first array, whose gradient is one operation too."""

    def run(*floats: mx.array) -> mx.array:
        return stand_in([shape], [floats[0].dtype], *floats, *others)[0]

    function: Any = mx.custom_function(run)

    @function.vjp
    def gradient(given: Any, cotangent: mx.array, result: mx.array) -> Any:
        arrays = [given] if isinstance(given, mx.array) else list(given)
        shapes, dtypes = [x.shape for x in arrays], [x.dtype for x in arrays]
        found = stand_in(shapes, dtypes, *arrays, cotangent, *others)
        return found[0] if isinstance(given, mx.array) else tuple(found)

    y: mx.array = function(*floats)
    return y


def rope(x: mx.array, dims: int, *, offset: Any, freqs: Any = None, **options: Any) -> mx.array:
    """Stands in for `mx.fast.rope`, which a CPU computes by many operations and a GPU by one."""
    return _one_operation(x.shape, [x], offset, freqs)


def attention(q: mx.array, k: mx.array, v: mx.array, *, mask: Any, **options: Any) -> mx.array:
    """Stands in for `mx.fast.scaled_dot_product_attention`."""
    return _one_operation((*q.shape[:3], v.shape[3]), [q, k, v], mask)


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """Stands in for `mx.fast.rms_norm`."""
    return _one_operation(x.shape, [x] if weight is None else [x, weight])


def dequantize(
    weight: mx.array, scales: mx.array, biases: mx.array, *, bits: int, **options: Any
) -> mx.array:
    """Stands in for `mx.dequantize`."""
    shape = (weight.shape[0], weight.shape[1] * 32 // bits)
    return stand_in([shape], [scales.dtype], weight, scales, biases)[0]


class Operation(NamedTuple):
    """A node of a graph: its name and the dtypes of its inputs."""

    name: str
    inputs: tuple[mx.Dtype, ...]


def recorded_operations(function: Callable[..., Any], *arrays: mx.array) -> list[Operation]:
    """The operations that make the results of a function of arrays, without views."""
    found: list[Operation] = []

    def note(event: dict[str, Any]) -> None:
        if event["type"] == "primitive" and event["name"] not in VIEWS:
            dtypes = tuple(dtype for _, _, dtype in event["inputs"])
            found.append(Operation(event["name"], dtypes))

    mx.export_function(note, function, *arrays)
    return found


def multiply_adds(function: Callable[..., Any], *arrays: mx.array) -> int:
    """The multiply-adds of the products of matrices in the results of a function of arrays."""
    total = 0

    def note(event: dict[str, Any]) -> None:
        nonlocal total
        if event["type"] == "primitive" and event["name"] in ("Matmul", "AddMM"):
            total += math.prod(event["outputs"][0][1]) * event["inputs"][0][1][-1]

    mx.export_function(note, function, *arrays)
    return total
