"""The compiled CPU kernels: C++ sources, one folder per operation, and their loader."""

from mlx_mmfree.native.loader import kernels, unavailable

__all__ = ["kernels", "unavailable"]
