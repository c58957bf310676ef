"""Loads the compiled CPU kernels, or says as text why they cannot be used.

They compute with the threads of `platform.threads` and the fastest instruction set that the processor
has, or the one that `MLX_MMFREE_CPU_KERNELS` names. MLX's dense products share these threads.
"""

import functools
import importlib
import os
from importlib.metadata import version
from types import ModuleType

# the compiled module links to libmlx and shares its types: mlx.core has to be loaded first
import mlx.core  # noqa: F401

from ..errors import BackendError, UsageError
from ..platform import blas
from ..platform.threads import thread_count
from ..version import __version__
from . import sources

PACKAGE = "_mlx_mmfree_native"
INSTRUCTIONS = "MLX_MMFREE_CPU_KERNELS"
REBUILD = (
    "Rebuild it: pip install cmake nanobind ninja scikit-build-core && "
    "pip install --no-build-isolation --force-reinstall --no-deps "
)


def rebuild() -> str:
    """How the extension is built again: from the clone that runs, or else from the released sources."""
    is_clone = sources.digest() is not None
    return REBUILD + ("." if is_clone else "--no-binary mlx-mmfree mlx-mmfree")


def kernels() -> ModuleType:
    """Returns the compiled module.

    Raises:
        BackendError: It was not built, was built for another version, or does not load.
    """
    module, reason = _load()
    if module is None:
        raise BackendError(f"[native] {reason}")
    return module


def unavailable() -> str | None:
    """Returns `None` if the compiled kernels can be used, else the reason and a hint."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ModuleType | None, str | None]:
    try:
        package = importlib.import_module(PACKAGE)
    except ModuleNotFoundError as error:
        if error.name != PACKAGE:
            raise
        return None, (
            "the CPU extension was not built, because no C++ compiler worked during the "
            f"installation or because the package is not installed. {rebuild()}"
        )
    for subject, built, running in (
        ("MLX", package.MLX_VERSION, version("mlx")),
        ("mlx_mmfree", package.__version__, __version__),
    ):
        if built != running:
            return None, (
                f"the CPU extension was built for {subject} {built} but {subject} {running} is "
                f"running. {rebuild()}"
            )
    if sources.digest() not in (None, getattr(package, "SOURCES", "")):
        return (
            None,
            f"the CPU extension was built from other C++ sources than those here. {rebuild()}",
        )
    try:
        module = importlib.import_module(f"{PACKAGE}._ext")
    except ImportError as error:
        return None, f"the CPU extension was built but does not load: {error}. {rebuild()}"
    module.set_threads(thread_count())
    blas.share(module.share_products)
    if name := os.environ.get(INSTRUCTIONS):
        _use_instructions(module, name)
    return module, None


def _use_instructions(module: ModuleType, name: str) -> None:
    if name not in module.kernel_names():
        raise UsageError(
            f"[environment] '{INSTRUCTIONS}' must be one of {', '.join(module.kernel_names())} on "
            f"this processor but got {name!r:.40}."
        )
    module.use_kernels(name)
