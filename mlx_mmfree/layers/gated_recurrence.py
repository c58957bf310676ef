"""The recurrence of mixers that forget by a bounded gate."""

import mlx.core as mx
import mlx.nn as nn

from ..ops import linear_scan
from .context import Context


def bounded_gate(x: mx.array, lower_bound: mx.array | None) -> tuple[mx.array, mx.array]:
    r"""A gate :math:`f = b + (1 - b)\,\sigma(x)`, and :math:`1 - f` without the cancellation.

    Args:
        x: `(..., E)`.
        lower_bound: `b`, `(E,)`; `None`: 0.

    Returns:
        Both in float32.
    """
    x = x.astype(mx.float32)
    f, free = mx.sigmoid(x), mx.sigmoid(-x)
    if lower_bound is None:
        return f, free
    bound = lower_bound.astype(mx.float32)
    return bound + (1.0 - bound) * f, (1.0 - bound) * free


def gated_recurrence(
    i: mx.array,
    f: mx.array,
    hidden: mx.array,
    context: Context,
    lower_bound: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    r"""Runs :math:`h_t = f_t \odot h_{t-1} + (1 - f_t) \odot \mathrm{silu}(i_t)`.

    Args:
        i: Inputs before the activation, `(B, L, E)`.
        f: Gates before the sigmoid, `(B, L, E)`.
        hidden: The state before, float32 `(B, E)`.
        context: The tokens of the call.
        lower_bound: That of the gates, `(E,)`; `None`: 0.

    Returns:
        All states, float32 `(B, L, E)`, and the last one.
    """
    gate, free = bounded_gate(f, lower_bound)
    i = nn.silu(i.astype(mx.float32)) * free
    if context.starts is not None:
        gate = mx.where(context.starts[..., None], 0.0, gate)
    if context.valid is not None:
        gate = mx.where(context.valid[..., None], gate, 1.0)
        i = mx.where(context.valid[..., None], i, 0.0)
    return linear_scan(gate, i, hidden)
