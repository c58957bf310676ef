"""What every test shares."""

from collections.abc import Iterator

import pytest

from mlx_mmfree import native


@pytest.fixture
def fused() -> None:
    """Lets `mx.compile` fuse operations on a CPU, as it does for users."""


@pytest.fixture(autouse=True)
def unfused(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fusing starts a C++ compiler, seconds a test, and has nothing to do with our operations."""
    if native.unavailable() or "fused" in request.fixturenames:
        yield
        return
    native.kernels().set_fusion(False)
    yield
    native.kernels().set_fusion(True)
