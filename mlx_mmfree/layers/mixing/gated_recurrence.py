"""The recurrence of mixers that forget by a bounded gate."""

import mlx.core as mx

from ...ops import linear_scan
from ...ops.activations import silu
from ..context import Context


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
    i = silu(i.astype(mx.float32)) * free
    if context.starts is not None:
        gate = mx.where(context.starts[..., None], 0.0, gate)
    if context.valid is not None:
        gate = mx.where(context.valid[..., None], gate, 1.0)
        i = mx.where(context.valid[..., None], i, 0.0)
    return linear_scan(gate, i, hidden)


def weights_of_gates(gate: mx.array, free: mx.array) -> mx.array:
    r"""Those of the recurrence :math:`h_t = f_t \odot h_{t-1} + g_t \odot v_t`, unrolled from zero.

    .. math::
        A_{t,s} = g_s \odot \prod_{r=s+1}^{t} f_r, \quad s \le t

    Args:
        gate: :math:`f`, `(B, L, E)`.
        free: :math:`g`, of the same shape.

    Returns:
        Those of each channel, float32 `(B, E, L, L)`.
    """
    batch, length, dims = gate.shape
    gates = mx.broadcast_to(gate[..., None], (*gate.shape, length))
    values = free[..., None] * mx.eye(length)[:, None]
    weights, _ = linear_scan(
        mx.flatten(gates, 2), mx.flatten(values, 2), mx.zeros((batch, dims * length))
    )
    return mx.unflatten(weights, 2, (dims, length)).swapaxes(1, 2)
