"""Which operations a graph of MLX is made of."""

import io
import re
from collections import Counter
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

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
    graph = io.StringIO()
    mx.export_to_dot(graph, *(array for _, array in tree_flatten(result)))
    found: Counter[str] = Counter()
    for name in re.findall(r'label ?= ?"([A-Za-z]+)"', graph.getvalue()):
        is_fused = name.startswith("Compiled")
        found.update(re.findall("[A-Z][a-z]+", name)[1:] if is_fused else [name])
    return Counter({name: count for name, count in found.items() if name not in VIEWS})


def stand_in(shapes: list[Any], dtypes: list[mx.Dtype], *inputs: Any) -> list[mx.array]:
    """Zeros that one operation, named `Depends`, makes of all inputs that are arrays."""
    arrays = [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return list(mx.depends(arrays, [array for array in inputs if isinstance(array, mx.array)]))


def rope(x: mx.array, dims: int, *, offset: Any, freqs: Any = None, **options: Any) -> mx.array:
    """Stands in for `mx.fast.rope`, which a CPU computes by many operations and a GPU by one."""
    return stand_in([x.shape], [x.dtype], x, offset, freqs)[0]


def attention(q: mx.array, k: mx.array, v: mx.array, *, mask: Any, **options: Any) -> mx.array:
    """Stands in for `mx.fast.scaled_dot_product_attention`."""
    return stand_in([(*q.shape[:3], v.shape[3])], [q.dtype], q, k, v, mask)[0]


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """Stands in for `mx.fast.rms_norm`."""
    return stand_in([x.shape], [x.dtype], x, weight)[0]
