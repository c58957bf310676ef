"""The compiled CPU kernels: C++ sources, one folder per operation, and their loader."""

from .loader import kernels as kernels
from .loader import unavailable as unavailable
