"""The compiled kernels with each instruction set of this processor, and with several threads."""

from collections.abc import Iterator

import pytest

from mlx_mmfree import native

NAMES = [] if native.unavailable() else native.kernels().kernel_names()


@pytest.fixture(params=NAMES)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the instruction set in use."""
    before = native.kernels().kernel_name()
    native.kernels().use_kernels(request.param)
    yield request.param
    native.kernels().use_kernels(before)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of threads in use."""
    before = native.kernels().threads()
    native.kernels().set_threads(request.param)
    yield request.param
    native.kernels().set_threads(before)
