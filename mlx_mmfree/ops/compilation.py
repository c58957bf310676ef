"""`mx.compile` for a step that is repeated, without what it builds at run time on a CPU."""

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..native import kernels, unavailable

_tracing = threading.Lock()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function of arrays on the CPU, so that MLX repeats its graph without Python.

    `mx.compile` also fuses elementwise operations, for which it starts a C++ compiler on a CPU:
    seconds at the first call, and an error where there is none. Here it does not. Without the CPU
    extension, on other devices and after `mx.disable_compile()` the function is returned as it is.

    Args:
        function: Its results depend on its arguments and on arrays that do not change. The shape of
            the first argument decides those of the others.
    """
    if not can_compile():
        return function
    repeated = mx.compile(function)
    traced: set[Any] = set()

    def call(*args: Any) -> Any:
        # MLX traces in each thread
        key = (threading.get_ident(), args[0].shape)
        if key in traced:
            return repeated(*args)
        with _tracing:
            kernels().set_fusion(False)
            try:
                result = repeated(*args)
            finally:
                kernels().set_fusion(True)
        traced.add(key)
        return result

    return call


def can_compile() -> bool:
    """Whether `compiled` compiles here and now."""
    if mx.default_device() != mx.Device(mx.cpu) or unavailable():
        return False
    calls: list[None] = []

    def count(x: mx.array) -> mx.array:
        calls.append(None)
        return -x

    repeated = mx.compile(count)
    one = mx.array(1)
    repeated(one), repeated(one)
    return len(calls) == 1
