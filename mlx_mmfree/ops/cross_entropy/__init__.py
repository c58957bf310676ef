"""The cross-entropy of logits."""

import mlx.core as mx

from ..backend.dispatch import dispatch


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
    losses: mx.array = dispatch(__name__, logits, targets)
    return losses
