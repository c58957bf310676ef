"""`cross_entropy` on the CPU in C++: one pass for the losses and one for the gradient."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend.native_kernel import Arrays, native_kernel
from ..float_dtypes import FLOATS
from . import reference


def unsupported(logits: mx.array, targets: mx.array) -> str | None:
    return None if logits.dtype in FLOATS else f"'logits' is {logits.dtype}"


def run(logits: mx.array, targets: mx.array) -> mx.array:
    losses: mx.array = _kernel()(logits, targets.astype(mx.int32))
    return losses


def _gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    logits, targets, _, cotangent = arrays
    gradients: list[mx.array] = mx.vjp(
        lambda logits: reference.run(logits, targets), [logits], [cotangent]
    )[1]
    return gradients


_kernel = native_kernel("cross_entropy", _gradient)
