"""Packed matrices that are kept as floats too, four bytes a weight, where memory allows."""

import os
import threading
import weakref
from functools import cache

import mlx.core as mx

from ..errors import UsageError
from ..platform.device import available_memory_bytes
from .ternary import unpack_ternary

LIMIT = "MLX_MMFREE_UNPACKED_MB"
"""The environment variable that says how many megabytes floats may take."""

SHARE = 0.25
"""Of the memory that is free when the first matrix is unpacked: the limit where none is given."""


class UnpackedMatrices:
    """Floats of packed matrices, found by the packed array itself, with which they go.

    Args:
        limit_bytes: The most that they take together.
    """

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._kept: dict[int, tuple[weakref.ref, mx.array]] = {}
        self._lock = threading.RLock()

    def find(self, weight: mx.array, input_dims: int) -> mx.array | None:
        """The trits of `weight` as float32 `(N, D)`; `None` where there is no room for them."""
        kept = self._kept.get(id(weight))
        if kept is not None and kept[0]() is weight:
            return kept[1]
        size_bytes = 4 * weight.shape[0] * input_dims
        if self.size_bytes + size_bytes > self.limit_bytes:
            return None
        trits = unpack_ternary(weight, input_dims)
        try:
            mx.eval(trits)
        except ValueError:
            # traced: it has no values yet
            return None
        self._keep(weight, trits)
        return trits

    def _keep(self, weight: mx.array, trits: mx.array) -> None:
        key = id(weight)

        def forget(reference: weakref.ref) -> None:
            with self._lock:
                if key in self._kept and self._kept[key][0] is reference:
                    del self._kept[key]
                    self.size_bytes -= trits.nbytes

        with self._lock:
            if key not in self._kept or self._kept[key][0]() is None:
                self._kept[key] = weakref.ref(weight, forget), trits
                self.size_bytes += trits.nbytes


@cache
def unpacked_matrices() -> UnpackedMatrices:
    """Those of this process.

    Raises:
        UsageError: The environment variable holds no number of megabytes.
    """
    if given := os.environ.get(LIMIT):
        if not (given.isdecimal() and len(given) < 10):
            raise UsageError(
                f"[environment] '{LIMIT}' must be a whole number of megabytes but got {given!r:.40}."
            )
        return UnpackedMatrices(int(given) * 10**6)
    return UnpackedMatrices(int(SHARE * (available_memory_bytes() or 0)))
