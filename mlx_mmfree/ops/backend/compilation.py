"""Compiles a step that is repeated, without starting a C++ compiler on a CPU."""

import ctypes
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ...native import kernels, unavailable

_MODE_FUNCTION = "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"
"""`mlx::core::set_compile_mode`, which `mlx.core` does not offer."""
_NO_FUSION, _FUSION = 2, 3

_CPU = mx.Device(mx.cpu)
# MLX traces the first function of a process twice
_CALLS = 3

_tracing = threading.RLock()
_call: ContextVar[ExitStack | None] = ContextVar("call", default=None)
# whether a function is traced by `compiled` here and now
_is_tracing: ContextVar[bool] = ContextVar("is_tracing", default=False)


def random_key() -> mx.array:
    """The key from which MLX's global generator draws its next numbers, as a copy."""
    # the generator writes to its own array
    return mx.stop_gradient(cast(Any, mx.random.state)[0])


def set_random_key(key: mx.array) -> None:
    """Makes MLX's global generator draw its next numbers from a key."""
    cast(Any, mx.random.state)[0][:] = key


def compiled(function: Callable[..., Any], *, is_random: bool = False) -> Callable[..., Any]:
    """Compiles a function of arrays, so that MLX repeats its graph without Python.

    `mx.compile` also fuses elementwise operations. On a CPU it starts a C++ compiler for that, which
    takes seconds at the first call, so this function does not let it fuse anything there. The caller has
    asked `can_compile`.

    Args:
        function: A function whose results depend on its arguments and on arrays that do not change.
        is_random: Whether the function draws numbers from MLX's global generator.
    """

    def traced(*args: Any) -> Any:
        # only MLX knows when it traces: for other shapes, dtypes and trees, and in each thread
        call = _call.get()
        assert call is not None
        call.enter_context(_tracing)
        if mx.default_device() == _CPU:
            # until MLX would have fused what is traced here
            call.enter_context(without_fusion())
        token = _is_tracing.set(True)
        try:
            return function(*args)
        finally:
            _is_tracing.reset(token)

    state: Any = mx.random.state if is_random else None
    repeated = mx.compile(traced, inputs=state, outputs=state)

    def call(*args: Any) -> Any:
        key = random_key() if is_random else None
        with ExitStack() as stack:
            token = _call.set(stack)
            try:
                return repeated(*args)
            except BaseException:
                # MLX leaves the generator what it was in the middle of the trace, without a value
                if key is not None:
                    set_random_key(key)
                raise
            finally:
                _call.reset(token)

    return call


def fold(*arrays: mx.array) -> None:
    """Computes arrays that depend on weights alone, so that a repeated step does not compute them again.

    Nothing happens outside of `compiled`, or to arrays that depend on the arguments of the step.
    """
    if not _is_tracing.get():
        return
    try:
        mx.eval(arrays)
    except ValueError:
        # they have no values while they are traced
        return


def fused(results: Any, arguments: Any) -> Any:
    """Nested results of arguments that are arrays, as one operation of MLX where a CPU repeats a step.

    MLX prepares each operation of a graph anew for each call, which takes as long as a small kernel.

    Args:
        results: The results, nested in any way.
        arguments: All that they depend on, beside arrays that do not change, nested too.

    Returns:
        The results. They have no gradient.
    """
    fuse = _fuse()
    if fuse is None or not _is_tracing.get() or mx.default_device() != _CPU:
        return results
    outputs, inputs = (
        [each for _, each in cast(Any, tree_flatten(values)) if isinstance(each, mx.array)]
        for values in (results, arguments)
    )
    found = iter(fuse(outputs, inputs))
    return tree_map(lambda each: next(found) if isinstance(each, mx.array) else each, results)


@cache
def _fuse() -> Callable[..., list[mx.array]] | None:
    """A function that makes one operation of several, or `None` without compiled kernels."""
    return None if unavailable() else cast(Callable[..., list[mx.array]], kernels().joined)


def can_compile() -> bool:
    """Returns whether `compiled` compiles here and now."""
    calls: list[None] = []

    def count(x: mx.array) -> mx.array:
        calls.append(None)
        return -x

    repeated = mx.compile(count)
    one = mx.array(1)
    for _ in range(_CALLS):
        repeated(one)
    return len(calls) < _CALLS and (mx.default_device() != _CPU or _can_stop_fusion())


@contextmanager
def without_fusion() -> Iterator[None]:
    """Inside the `with` block, MLX's compilation fuses nothing, as where `compiled` traces on a CPU."""
    switch = _fusion_switch()
    # what somebody else turned off stays off
    if switch is None or not _fuses():
        yield
        return
    switch(False)
    try:
        yield
    finally:
        switch(True)


@cache
def _fusion_switch() -> Callable[[bool], None] | None:
    """A function that turns fusion on and off, or `None` if this MLX does not offer one."""
    if not unavailable():
        switch: Callable[[bool], None] = kernels().set_fusion
        return switch
    folder = Path(mx.__file__).parent / "lib"
    for path in (*folder.glob("libmlx.so"), *folder.glob("libmlx.dylib")):
        try:
            set_mode = ctypes.CDLL(str(path))[_MODE_FUNCTION]
        except (OSError, AttributeError):
            continue
        set_mode.argtypes, set_mode.restype = (ctypes.c_int,), None
        return lambda is_on: set_mode(_FUSION if is_on else _NO_FUSION)
    return None


@cache
def _can_stop_fusion() -> bool:
    """Returns whether the switch does what it is for."""
    if _fusion_switch() is None:
        return False
    with _tracing, without_fusion():
        return not _fuses()


def _fuses() -> bool:
    """Returns whether `mx.compile` fuses the operations of a small graph here and now."""
    graph = io.StringIO()
    mx.export_to_dot(graph, mx.compile(lambda x: mx.abs(-x) + 1)(mx.array(1.0)))
    return "Compiled" in graph.getvalue()
