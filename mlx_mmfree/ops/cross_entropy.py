"""The cross-entropy of logits."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from .backend.dispatch import FLOATS, Arrays, Backend, Example, Operation, native_kernel
from .long_sums import logsumexp


def cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    r"""The negative log-likelihood of each target, in nats.

    .. math::
        \ell = \log \sum_j e^{z_j} - z_y

    Computed in float32. Sums over a vocabulary are added block by block.

    Args:
        logits: Floats of shape `(..., V)`.
        targets: Integers of shape `(...)`.

    Returns:
        float32 `(...)`.

    Raises:
        ValueError: The shapes do not agree, or there are no logits for a target.

    Example:
        >>> losses = cross_entropy(mx.array([[0.0, 0.0], [0.0, 50.0]]), mx.array([0, 1]))
        >>> [round(loss, 4) for loss in losses.tolist()]
        [0.6931, 0.0]
    """
    if logits.ndim < 1 or logits.shape[:-1] != targets.shape or not logits.shape[-1]:
        raise ValueError(
            "[cross_entropy] 'logits' and 'targets' must have shapes (..., V) and (...) with V > 0 but "
            f"got {logits.shape} and {targets.shape}."
        )
    if not targets.size:
        return mx.zeros(targets.shape)
    losses: mx.array = _operation(logits, targets)
    return losses


def reference(logits: mx.array, targets: mx.array) -> mx.array:
    """The definition in plain operations."""
    logits = logits.astype(mx.float32)
    chosen = mx.take_along_axis(logits, targets[..., None], axis=-1).squeeze(-1)
    return logsumexp(logits) - chosen


def native(logits: mx.array, targets: mx.array) -> mx.array:
    """One pass in C++ for the losses and one for the gradient."""
    losses: mx.array = _kernel()(logits, targets.astype(mx.int32))
    return losses


def _unsupported(logits: mx.array, targets: mx.array) -> str | None:
    return None if logits.dtype in FLOATS else f"'logits' is {logits.dtype}"


def _gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    logits, targets, _, cotangent = arrays
    gradients: list[mx.array] = mx.vjp(
        lambda logits: reference(logits, targets), [logits], [cotangent]
    )[1]
    return gradients


def _examples() -> Iterator[Example]:
    for dtype in FLOATS:
        yield Example((mx.zeros((1, 32), dtype), mx.zeros((1,), mx.int32)))


_kernel = native_kernel("cross_entropy", _gradient)
_operation = Operation(
    "cross_entropy",
    _examples,
    native=Backend(native, _unsupported, refuses=True),
    metal=reference,
    chunked=reference,
    reference=reference,
)
