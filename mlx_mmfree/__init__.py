"""Language models without dense matrix multiplication, on MLX."""

from .platform import blas as _blas

_blas.bind()

from .version import __version__ as __version__  # noqa: E402
