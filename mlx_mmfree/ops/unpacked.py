"""Keeps packed matrices as floats too, with four bytes a weight, if there is memory for them."""

import os
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from ..errors import UsageError
from ..platform.device import available_memory_bytes
from .backend.dispatch import uses_plain_operations
from .host_blocks import unpack_codes

LIMIT = "MLX_MMFREE_UNPACKED_MB"
"""The environment variable that says how many megabytes floats may take."""

SHARE = 0.25
"""The limit if none is given, as a share of the memory that is free at the first matrix."""

BLOCK_WEIGHTS = 2**18
"""The most weights that OpenBLAS multiplies by few rows without copying them, on one thread. Larger
matrices take it three times as long."""

LEAST_BLOCK_OUTPUTS = 16

FEW_ROWS = 16
"""The most rows of activations that are multiplied by blocks. More meet the whole matrix."""


class Floats(NamedTuple):
    """Two views of the same numbers.

    Attributes:
        whole: The trits, float32 `(N, D)`.
        blocks: The same trits, `(N / C, D, C)`, in blocks small enough for a fast product with few rows.
    """

    whole: mx.array
    blocks: mx.array


class UnpackedMatrices:
    """The floats of packed matrices, which live as long as the packed arrays do.

    Args:
        limit_bytes: The most that they may take together.
    """

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._cached: dict[tuple[int, ...], tuple[list[weakref.ref], Floats]] = {}
        self._lock = threading.RLock()

    def find(self, weights: Sequence[mx.array], input_dims: int) -> Floats | None:
        """The trits of matrices, one below the other, or `None` if there is no space for them.

        Inside `use_plain_operations` there is none, so that a graph holds packed weights.

        Args:
            weights: The packed matrices, uint32 `(N_p, packed_width(D))`.
            input_dims: `D`.
        """
        if uses_plain_operations():
            return None
        key = tuple(map(id, weights))
        if found := self._found(key, weights):
            return found
        new = [weight for weight in weights if not self._found((id(weight),), (weight,))]
        size_bytes = sum(_bytes(weight, input_dims) for weight in new)
        if self.size_bytes + size_bytes > self.limit_bytes:
            return None
        try:
            mx.eval(weights)
        except ValueError:
            # arrays that are traced have no values yet
            return None
        trits = unpack_codes(weights, input_dims)
        with self._lock:
            self._keep(key, weights, _floats(trits, [weight.shape[0] for weight in weights]))
            self._keep_each(weights, trits)
        return self._found(key, weights)

    def _found(self, key: tuple[int, ...], weights: Sequence[mx.array]) -> Floats | None:
        entry = self._cached.get(key)
        if entry is None or any(
            reference() is not weight for reference, weight in zip(entry[0], weights, strict=True)
        ):
            return None
        return entry[1]

    def _keep_each(self, weights: Sequence[mx.array], trits: mx.array) -> None:
        """Keeps each matrix as a part of them all, so that no memory is taken twice."""
        start = 0
        for weight in weights:
            part = trits[start : start + weight.shape[0]]
            start += weight.shape[0]
            key = (id(weight),)
            if not self._found(key, (weight,)) or len(weights) > 1:
                self._keep(key, (weight,), _floats(part, [part.shape[0]]))

    def _keep(self, key: tuple[int, ...], weights: Sequence[mx.array], floats: Floats) -> None:
        def forget(reference: weakref.ref) -> None:
            with self._lock:
                entry = self._cached.get(key)
                if entry is not None and any(reference is each for each in entry[0]):
                    del self._cached[key]
                    self._count(key, floats, -1)

        if key in self._cached:
            self._count(key, self._cached[key][1], -1)
        self._cached[key] = [weakref.ref(weight, forget) for weight in weights], floats
        self._count(key, floats, 1)

    def _count(self, key: tuple[int, ...], floats: Floats, sign: int) -> None:
        """Counts single matrices only, because several share the memory of their parts."""
        if len(key) == 1:
            self.size_bytes += sign * floats.whole.nbytes


def _bytes(weight: mx.array, input_dims: int) -> int:
    return 4 * weight.shape[0] * input_dims


def _floats(trits: mx.array, outputs: Sequence[int]) -> Floats:
    """Both views of the trits of matrices that have so many outputs each."""
    dims = trits.shape[1]
    # equal matrices are cut between blocks
    whole = outputs[0] if len(set(outputs)) == 1 else sum(outputs)
    most = min(max(BLOCK_WEIGHTS // dims, 1), whole)
    width = next(size for size in range(most, 0, -1) if whole % size == 0)
    if width < LEAST_BLOCK_OUTPUTS:
        width = whole
    floats = Floats(trits, trits.reshape(-1, width, dims).swapaxes(1, 2))
    mx.eval(floats)
    return floats


@cache
def unpacked_matrices() -> UnpackedMatrices:
    """The unpacked matrices of this process.

    Raises:
        UsageError: The environment variable does not hold a number of megabytes.
    """
    if given := os.environ.get(LIMIT):
        if not (given.isdecimal() and len(given) < 10):
            raise UsageError(
                f"[environment] '{LIMIT}' must be a whole number of megabytes but got {given!r:.40}."
            )
        return UnpackedMatrices(int(given) * 10**6)
    return UnpackedMatrices(int(SHARE * (available_memory_bytes() or 0)))
