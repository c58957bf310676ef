"""What MLGRU computes between its projections."""

from typing import NamedTuple

import mlx.core as mx

from ..backend.dispatch import dispatch


class Options(NamedTuple):
    """What `mlgru_step` hands on to its backends beside gates, state and weight."""

    eps: float
    lower_bound: mx.array | None = None
    valid: mx.array | None = None
    starts: mx.array | None = None


def mlgru_step(
    gates: mx.array,
    state: mx.array,
    weight: mx.array,
    *,
    eps: float,
    lower_bound: mx.array | None = None,
    valid: mx.array | None = None,
    starts: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    r"""Runs the gated recurrence of MLGRU over one position or more and gates its output.

    .. math::
        f_t &= b + (1 - b) \odot \sigma(\hat f_t) \\
        h_t &= f_t \odot h_{t-1} + \mathrm{silu}(\hat i_t) \odot (1 - f_t) \\
        y_t &= \mathrm{RMSNorm}(g_t) \odot \mathrm{silu}(h_t)

    Computed in float32. Source: arXiv 2406.02528 sec. 3.3 as released; see `linear_scan` for the
    order of its sums.

    Args:
        gates: :math:`\hat i`, :math:`\hat f` and `g`, one behind the other, `(B, L, 3E)`, any float
            dtype.
        state: :math:`h_0`, float32 `(B, E)`.
        weight: Scale of the norm of `g`, `(E,)`.
        eps: Epsilon of that norm.
        lower_bound: `b`, `(E,)`, or `None` for 0.
        valid: Booleans `(B, L)`. Where one is `False`, the state stays as it is.
        starts: Booleans `(B, L)`. Where one is `True` and the position is valid, the state before it
            counts as zero.

    Returns:
        `y`, `(B, L, E)` in the dtype of `gates`, and the last state, float32 `(B, E)`.

    Raises:
        ValueError: The shapes do not agree, or `E` is zero.

    Example:
        >>> y, state = mlgru_step(mx.ones((2, 5, 24)), mx.zeros((2, 8)), mx.ones(8), eps=1e-6)
        >>> y.shape, state.shape
        ((2, 5, 8), (2, 8))
    """
    options = Options(eps, lower_bound, valid, starts)
    if gates.size == 0:
        check(gates, state, weight, options)
        return mx.zeros((*gates.shape[:2], state.shape[1]), gates.dtype), state.astype(mx.float32)
    y, last = dispatch(__name__, gates, state, weight, options)
    return y, last


def check(gates: mx.array, state: mx.array, weight: mx.array, options: Options) -> None:
    """Refuses what `mlgru_step` cannot compute, with `ValueError`."""
    fits = gates.ndim == 3 and state.shape == (gates.shape[0], gates.shape[2] // 3)
    if not fits or gates.shape[2] != 3 * state.shape[1] or state.shape[1] == 0:
        raise ValueError(
            "[mlgru_step] 'gates' and 'state' must have shapes (B, L, 3E) and (B, E) with E > 0 but "
            f"got {gates.shape} and {state.shape}."
        )
