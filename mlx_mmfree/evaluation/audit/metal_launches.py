"""How many kernels a decoded token launches on Metal, counted in a graph that is built without Metal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ...models import Decoder
from ...ops.backend import choice, dispatch, launch
from .primitives import VIEWS
from .record import record


def metal_launches(model: Decoder, position: int) -> int:
    """How many kernels of this library and of MLX decode a token; numbers and views launch none.

    The kernels are those that are chosen where none was timed.
    """
    with (
        launch.recording(is_linked=True),
        dispatch.use_any_backend(),
        choice.use(choice.DEFAULT),
        _as_one(),
    ):
        dispatch.forget_candidates()
        try:
            graph = record(model, position).graph
        finally:
            dispatch.forget_candidates()
    # `Depends` stands for a kernel
    silent = VIEWS - {"Depends"} | {"Full"}
    return sum(node.name not in silent for node in graph.nodes)


@contextmanager
def _as_one() -> Iterator[None]:
    """Lets MLX's fast operations stand in the graph as one operation each, as they run on a GPU."""

    def stand_in(shape: tuple[int, ...], dtype: mx.Dtype, *inputs: Any) -> mx.array:
        arrays = [array for array in inputs if isinstance(array, mx.array)]
        result: mx.array = mx.depends(mx.zeros(shape, dtype), arrays)
        return result

    def like_the_first(x: mx.array, *others: Any, **options: Any) -> mx.array:
        return stand_in(x.shape, x.dtype, x, *others, *options.values())

    def attention(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        return stand_in((*q.shape[:3], v.shape[3]), q.dtype, q, k, v, *options.values())

    replaced = {
        "layer_norm": like_the_first,
        "rms_norm": like_the_first,
        "rope": like_the_first,
        "scaled_dot_product_attention": attention,
    }
    usual = {name: getattr(mx.fast, name) for name in replaced}
    for name, function in replaced.items():
        setattr(mx.fast, name, function)
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(mx.fast, name, function)
