"""Gradients for functions that MLX cannot differentiate, and whether gradients are traced on Metal."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx

from . import launch

Function = Callable[..., Any]
Backward = Callable[[Sequence[mx.array], Sequence[mx.array], Sequence[mx.array]], tuple]

_is_left_out: ContextVar[bool] = ContextVar("is_left_out", default=False)


@contextmanager
def without_gradients() -> Iterator[None]:
    """Leaves out gradients of one's own inside the `with` block, as MLX cannot write them to a file."""
    token = _is_left_out.set(True)
    try:
        yield
    finally:
        _is_left_out.reset(token)


def with_reference_gradient(
    run: Function,
    reference: Function,
    backward: Backward | None = None,
    *,
    is_differentiable: bool = False,
) -> Function:
    r"""Returns a function with the values of `run` and the gradient of `reference`.

    The result may be used under `mx.grad`, `mx.vmap` and `mx.compile` in any order. Under `mx.vmap` it
    is called once for each slice. MLX also asks `run` itself for a rule of `mx.vmap` and raises an
    error if it has none, so that a Metal kernel cannot be mapped.

    Args:
        run: Computes an array or a tuple of arrays from arrays. It need not be differentiable. Every
            array through which a gradient should flow must be an argument, because what the function
            captures counts as a constant.
        reference: The same function in differentiable operations.
        backward: Computes the gradient faster. It is called as `backward(inputs, cotangents, outputs)`
            with sequences of arrays and returns one gradient for each input. Those of inputs that are
            not floats are not used. By default the gradient is `reference`'s.
        is_differentiable: Whether MLX can differentiate `backward`. If not, all of its results are
            computed even if only one of them is used.
    """
    function: Any = mx.custom_function(run)

    @function.vjp
    def gradient(inputs: Any, cotangents: Any, outputs: Any) -> Any:
        inputs, cotangents, outputs = (_as_tuple(x) for x in (inputs, cotangents, outputs))
        if backward is not None and is_differentiable:
            gradients = backward(inputs, cotangents, outputs)
        else:
            gradients = _vjp(reference, backward, inputs, cotangents, outputs)
        return gradients if len(inputs) > 1 else gradients[0]

    @function.vmap
    def batched(inputs: Any, axes: Any) -> Any:
        inputs, axes = _as_tuple(inputs), _as_tuple(axes)
        size = next(x.shape[axis] for x, axis in zip(inputs, axes, strict=True) if axis is not None)
        slices = [
            function(
                *(
                    x if axis is None else mx.take(x, row, axis=axis)
                    for x, axis in zip(inputs, axes, strict=True)
                )
            )
            for row in range(size)
        ]
        if isinstance(slices[0], mx.array):
            return mx.stack(slices), 0
        return tuple(mx.stack(list(parts)) for parts in zip(*slices, strict=True)), (0,) * len(
            slices[0]
        )

    def differentiable(*arrays: mx.array) -> Any:
        return run(*arrays) if _is_left_out.get() else function(*arrays)

    return differentiable


def _as_tuple(x: Any) -> tuple:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def _vjp(
    reference: Function,
    backward: Backward | None,
    inputs: tuple[mx.array, ...],
    cotangents: tuple[mx.array, ...],
    outputs: tuple[mx.array, ...],
) -> tuple[mx.array, ...]:
    """The gradient of every input; zeros for those that are not floats."""
    floats = [n for n, x in enumerate(inputs) if mx.issubdtype(x.dtype, mx.floating)]
    ends = (len(inputs), len(inputs) + len(cotangents))

    def of_reference(*arrays: mx.array) -> tuple[mx.array, ...]:
        primals = list(arrays[: ends[0]])

        def of_floats(*values: mx.array) -> Any:
            for n, value in zip(floats, values, strict=True):
                primals[n] = value
            return reference(*primals)

        return tuple(mx.vjp(of_floats, [primals[n] for n in floats], list(arrays[slice(*ends)]))[1])

    if backward is None:
        found = of_reference(*inputs, *cotangents)
    else:
        given = backward

        def of_backward(*arrays: mx.array) -> tuple[mx.array, ...]:
            results = given(arrays[: ends[0]], arrays[slice(*ends)], arrays[ends[1] :])
            return tuple(results[n] for n in floats)

        found = with_reference_gradient(of_backward, of_reference)(*inputs, *cotangents, *outputs)
    by_input = dict(zip(floats, found, strict=True))
    return tuple(by_input.get(n, mx.zeros_like(x)) for n, x in enumerate(inputs))


_assumed: ContextVar[bool | None] = ContextVar("assumed", default=None)

# the least that a fused kernel takes
_HEADS = (1, 1, 16, 64)


@contextmanager
def assume_gradients(are_traced: bool) -> Iterator[None]:
    """Takes gradients for traced inside the `with` block, or for not traced, whatever MLX does."""
    token = _assumed.set(are_traced)
    try:
        yield
    finally:
        _assumed.reset(token)


def traces_gradients() -> bool:
    """Returns whether MLX traces gradients on Metal.

    MLX has no function that says so, but acts on it: it computes attention by plain operations then,
    a softmax among them, and by one kernel otherwise. The smallest attention shows which.
    """
    if (assumed := _assumed.get()) is not None:
        return assumed
    if launch.is_recording() or not mx.metal.is_available():
        return False
    x = mx.zeros(_HEADS)
    graph = io.StringIO()
    mx.export_to_dot(graph, mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0))
    return "Softmax" in graph.getvalue()
