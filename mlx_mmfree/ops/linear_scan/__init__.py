"""The elementwise linear recurrence of HGRN and MLGRU."""

import mlx.core as mx

from ..backend.dispatch import dispatch


def linear_scan(f: mx.array, i: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    r"""Runs :math:`s_t = f_t \odot s_{t-1} + i_t` over a sequence.

    Computed in float32 with one multiplication and one addition a step, so that on a CPU a row has the
    same bits whatever the batch and however the sequence is cut. On a GPU, sequences of 128 steps or
    more are computed in chunks, which changes the last bits. Source: arXiv 2311.04823 eq. 4.

    Args:
        f: Forget gates `(B, L, D)`, any float dtype.
        i: Gated inputs `(B, L, D)`.
        state: :math:`s_0`, float32 `(B, D)`.

    Returns:
        All states, float32 `(B, L, D)`, and the last one, float32 `(B, D)`.

    Raises:
        ValueError: The shapes do not agree.

    Example:
        >>> f, i = mx.full((1, 4, 1), 0.5), mx.ones((1, 4, 1))
        >>> states, last = linear_scan(f, i, mx.zeros((1, 1)))
        >>> states.flatten().tolist(), last.item()
        ([1.0, 1.5, 1.75, 1.875], 1.875)
    """
    if f.ndim != 3 or i.shape != f.shape or state.shape != (f.shape[0], f.shape[2]):
        raise ValueError(
            f"[linear_scan] 'f', 'i' and 'state' must have shapes (B, L, D), (B, L, D) and (B, D) "
            f"but got {f.shape}, {i.shape} and {state.shape}."
        )
    if f.size == 0:
        return mx.zeros(f.shape), state.astype(mx.float32)
    states, last = dispatch(__name__, f, i, state)
    return states, last
