"""An operation, its backends, and the choice of the one that runs it.

An operation is a file `ops/<op>.py` or a folder `ops/<op>/`, which declares it as an `Operation`: its
backends, small arguments that select every kernel, and what its compiled kernels take. Only this module
asks MLX on which device operations run.
"""

import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from ... import native
from ...errors import BackendError, UsageError
from . import choice, launch
from .cost import Call, Cost

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
"""The dtypes of floats that weights and activations may have."""

BACKENDS = ("metal", "cuda", "native", "chunked", "reference")
"""The known backends in order of preference.

Example:
    >>> BACKENDS[-1]
    'reference'
"""

ENVIRONMENT_VARIABLE = "MLX_MMFREE_BACKEND"

_CPU = mx.Device(mx.cpu)
_NOT_ON = {mx.cpu: "the default device is not the CPU", mx.gpu: "the default device is not a GPU"}

_forced: ContextVar[str | None] = ContextVar("forced_backend", default=None)
# "" inside `use_any_backend`, and this inside `use_plain_operations`
_PLAIN = "plain operations"
_KERNELS = ("metal", "cuda", "native")

Kernel = Callable[..., Any]
Arrays = Sequence[mx.array]
Definition = Callable[[Sequence[Any], tuple[Any, ...], Arrays], Arrays]


class Backend(NamedTuple):
    """A way to run an operation.

    Attributes:
        run: Takes the arguments that the operation hands on.
        unsupported: Takes the same, and returns as text why it cannot run with them, or `None`.
        fault: Takes the same, and returns as text why it computes them without a kernel of its own, or
            `None`. Reports ask it, and calls do not.
        only_on: The kind of device that it runs on, if it is one alone.
        refuses: It raises `ValueError` for arguments that do not fit or that it cannot run with. Nothing
            is asked before, which saves time in each decoded token.
    """

    run: Callable[..., Any]
    unsupported: Callable[..., str | None] | None = None
    fault: Callable[..., str | None] | None = None
    only_on: mx.DeviceType | None = None
    refuses: bool = False


class Example(NamedTuple):
    """The arguments that an operation hands to its backends.

    Attributes:
        args, kwargs: By position and by name.
        rows: The number of rows of a product, one of `launch.EXAMPLE_ROWS`.
        product: What computes a ternary product, as in `choice.NAMES`.
        is_trained: Whether gradients are traced.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = {}
    rows: int | None = None
    product: str = choice.DEFAULT
    is_trained: bool = False


def not_floats(*arguments: Any, **options: Any) -> str | None:
    """Returns why kernels cannot take these arguments, or `None` if all arrays of them are floats."""
    for each in arguments:
        if isinstance(each, mx.array) and each.dtype not in FLOATS:
            return f"it takes float32, float16 or bfloat16, not {each.dtype}"
    return None


class Operation:
    """An operation with its backends. Called with arguments, it runs on the first that fits.

    Args:
        name: The name of the public function.
        examples: Gives small arguments of each kind that layers use, which select every kernel.
        check: Raises `ValueError` where arguments do not fit; `None` if the public function does it.
        costs: What the primitives of its compiled kernels take, by the names that MLX shows.
        backends: By their names, each a function or a `Backend`. Several may share a definition.
    """

    def __init__(
        self,
        name: str,
        examples: Callable[[], Iterator[Example]],
        *,
        check: Callable[..., None] | None = None,
        costs: Mapping[str, Callable[[Call], Cost]] | None = None,
        **backends: Callable[..., Any] | Backend,
    ):
        self.name, self.examples, self.check, self.costs = name, examples, check, costs or {}
        self.backends = {
            each: given if isinstance(given, Backend) else Backend(given)
            for each in BACKENDS
            if (given := backends.pop(each, None)) is not None
        }
        assert not backends, f"{', '.join(backends)} must be one of {', '.join(BACKENDS)}"
        # those that the CPU has, and those that a GPU has, found once
        self.usable: dict[bool, list[Backend]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on the forced backend, or on the first that fits.

        Raises:
            BackendError: The forced backend cannot run these arguments, or no backend can.
        """
        forced = _forced.get()
        if forced is None:
            forced = environment_backend()
        if forced:
            return self._run_forced(forced, args, kwargs)
        for backend in self.usable.get(mx.default_device() == _CPU) or self._find():
            if backend.refuses:
                try:
                    return backend.run(*args, **kwargs)
                except (TypeError, ValueError):
                    if self._cannot_run(backend, args, kwargs):
                        continue
                    raise
            if not self._cannot_run(backend, args, kwargs):
                return backend.run(*args, **kwargs)
        raise BackendError(f"[{self.name}] no backend can run these arguments.")

    def _cannot_run(self, backend: Backend, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Returns whether a backend does not run with arguments that fit; refuses those that do not."""
        if self.check is not None:
            self.check(*args, **kwargs)
        return backend.unsupported is not None and bool(backend.unsupported(*args, **kwargs))

    def _find(self) -> list[Backend]:
        """The backends that the default device has, in order of preference."""
        found = [each for name, each in self.backends.items() if _missing(name, each) is None]
        self.usable[on_cpu()] = found
        return found

    def _run_forced(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.check is not None:
            self.check(*args, **kwargs)
        if name == _PLAIN:
            # the definition takes whatever others refuse
            name = next(
                each
                for each in self.backends
                if each not in _KERNELS and self.unsupported(each, args, kwargs) is None
            )
        reason: str | None = "it is not written"
        if name in self.backends:
            reason = self.unsupported(name, args, kwargs)
        if reason:
            raise BackendError(f"[{self.name}] the forced backend '{name}' cannot run: {reason}.")
        return self.backends[name].run(*args, **kwargs)

    def unsupported(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """Why a backend cannot run these arguments here, or `None`."""
        backend = self.backends[name]
        reason = _missing(name, backend)
        if reason or backend.unsupported is None:
            return reason
        return backend.unsupported(*args, **kwargs)

    def report(self, *args: Any, **kwargs: Any) -> dict[str, str | None]:
        """For each backend why it cannot run these arguments, or `None` where it can."""
        reasons = {name: self.unsupported(name, args, kwargs) for name in self.backends}
        for name, backend in self.backends.items():
            if reasons[name] is None and backend.fault is not None:
                reasons[name] = backend.fault(*args, **kwargs)
        return reasons


def operations() -> dict[str, Operation]:
    """All operations by their names, from each file and folder of `ops`."""
    package = importlib.import_module(__name__.rsplit(".", 2)[0])
    return _operations_in(package.__name__, *package.__path__)


@cache
def _operations_in(package: str, *folders: str) -> dict[str, Operation]:
    files = pkgutil.iter_modules(folders, f"{package}.")
    found = [each for file in files for each in vars(importlib.import_module(file.name)).values()]
    return {each.name: each for each in found if isinstance(each, Operation)}


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Forces one backend for every operation inside the `with` block.

    Args:
        name: One of `BACKENDS`. An operation that this backend cannot run raises `BackendError`.

    Raises:
        ValueError: No backend has this name.

    Example:
        >>> with use_backend("reference"):
        ...     y = rms_norm(mx.array([3.0, 4.0]), eps=0.0)
        >>> [round(n, 4) for n in y.tolist()]
        [0.8485, 1.1314]
    """
    if name not in BACKENDS:
        raise ValueError(f"[use_backend] 'name' {_rule(name)}")
    with _force(name):
        yield


@contextmanager
def use_any_backend() -> Iterator[None]:
    """Forces no backend inside the `with` block, whatever is forced outside of it.

    Inside `use_plain_operations` it changes nothing.
    """
    with _force(_PLAIN if uses_plain_operations() else ""):
        yield


@contextmanager
def use_plain_operations() -> Iterator[None]:
    """Lets every operation consist of MLX's own inside the `with` block.

    Packed weights stay as they are. Programs that know nothing of this library can repeat such a graph.
    """
    with _force(_PLAIN):
        yield


@contextmanager
def _force(name: str) -> Iterator[None]:
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def uses_plain_operations() -> bool:
    """Returns whether `use_plain_operations` is in force."""
    return _forced.get() == _PLAIN


def forced_backend() -> str | None:
    """The backend forced by `use_backend` or by the environment, or `None`.

    Raises:
        UsageError: The environment names an unknown backend.
    """
    name = _forced.get()
    return environment_backend() if name is None else name or None


@cache
def environment_backend() -> str | None:
    """The backend that the environment names when it is first asked, or `None`.

    Raises:
        UsageError: The environment names an unknown backend, or for products a way that there is not.
    """
    # only Metal asks for it, but a name that does nothing is refused on every device
    choice.environment_candidate()
    name = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name is not None and name not in BACKENDS:
        raise UsageError(f"[environment] '{ENVIRONMENT_VARIABLE}' {_rule(name)}")
    return name


def _rule(name: str) -> str:
    return f"must be one of {', '.join(BACKENDS)} but got {name!r:.40}."


@contextmanager
def recorded_calls(operation: Operation) -> Iterator[list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Records with which arguments an operation is called inside the `with` block, in any thread.

    Where a backend is forced, nothing is recorded.

    Yields:
        The arguments of each call, by position and by name.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def recording(run: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return run(*args, **kwargs)

        return record

    before = dict(operation.usable)
    usual = operation._find()
    operation.usable[on_cpu()] = [each._replace(run=recording(each.run)) for each in usual]
    try:
        yield calls
    finally:
        operation.usable = before


def forget_candidates() -> None:
    """Looks again for the backends that devices have, as a test needs that changes them."""
    for operation in operations().values():
        operation.usable.clear()


def on_cpu() -> bool:
    """Returns whether operations run on the CPU."""
    return mx.default_device() == _CPU


def metal_unavailable() -> str | None:
    """Returns `None` if Metal kernels can run on the default device, else the reason.

    Where their texts are only recorded, they can on every device.
    """
    if launch.is_recording() or (mx.metal.is_available() and not on_cpu()):
        return None
    return "no Metal device"


def cuda_unavailable() -> str | None:
    """Returns `None` if the default device is an NVIDIA GPU, else the reason."""
    return None if mx.cuda.is_available() and not on_cpu() else "no CUDA device"


def native_unavailable() -> str | None:
    """Returns `None` if the compiled kernels can run on the default device, else the reason.

    Where the texts of Metal's kernels are recorded, they cannot.
    """
    if launch.is_recording():
        return "kernels of Metal are recorded"
    return native.unavailable() if on_cpu() else _NOT_ON[mx.cpu]


def _missing(name: str, backend: Backend) -> str | None:
    """The reason why the default device cannot run a backend, or `None`."""
    if name == "metal":
        return metal_unavailable()
    if name == "cuda":
        return cuda_unavailable()
    if name == "native":
        return native_unavailable()
    only_on = backend.only_on
    return None if only_on is None or only_on == mx.default_device().type else _NOT_ON[only_on]


def backend_report(package: str, *args: Any, **kwargs: Any) -> dict[str, str | None]:
    """Asks each backend of an operation whether it can run some arguments.

    Args:
        package: The operation's module, such as `"mlx_mmfree.ops.rms_norm"`.
        args: The arguments by position that the operation passes to its backends.
        kwargs: Those by name.

    Returns:
        For each backend why it cannot run them, or `None` where it can.

    Example:
        >>> report = backend_report("mlx_mmfree.ops.rms_norm", mx.ones((1, 8)), None, eps=1e-6)
        >>> report["reference"] is None
        True
    """
    return operations()[package.rpartition(".")[2]].report(*args, **kwargs)


def native_kernel(name: str, definition: Definition | None = None) -> Callable[[], Kernel]:
    """A loader of a compiled kernel, whose gradient is its definition's.

    Args:
        name: The function of the compiled module.
        definition: The operation in differentiable operations; `None` where the kernel has no gradient,
            or makes it of itself. It is called with the list of the arrays of a call, `None` for each
            that was left out, the tuple of its options, and the list of its results, which may stand for
            what has no gradient.
    """

    def on_any_backend(*call: Any) -> list[mx.array]:
        assert definition is not None
        with use_any_backend():
            return list(definition(*call))

    @cache
    def load() -> Kernel:
        module = native.kernels()
        if definition is not None:
            getattr(module, f"define_{name}")(on_any_backend)
        kernel: Kernel = getattr(module, name)
        return kernel

    return load
