"""The common parts of recurrences: gates, and sums over what was read."""

import mlx.core as mx
import mlx.nn as nn

from ..ops import gated_linear_attention, gated_rms_norm, linear_scan
from ..ops.activations import silu
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
    i = silu(i.astype(mx.float32)) * free
    if context.starts is not None:
        gate = mx.where(context.starts[..., None], 0.0, gate)
    if context.valid is not None:
        gate = mx.where(context.valid[..., None], gate, 1.0)
        i = mx.where(context.valid[..., None], i, 0.0)
    return linear_scan(gate, i, hidden)


def gated_output(norm: nn.Module, o: mx.array, gate: mx.array) -> mx.array:
    """The norm of what heads have read, `(B, L, H, V)`, times the swish of a gate `(B, L, H V)`."""
    gate = mx.unflatten(gate, -1, o.shape[2:])
    return mx.flatten(gated_rms_norm(o, gate, norm["weight"], eps=norm.eps), 2)


def weights_of_gates(gate: mx.array, free: mx.array) -> mx.array:
    r"""Mixing weights of the recurrence :math:`h_t = f_t \odot h_{t-1} + g_t \odot v_t`, unrolled from
    zero.

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


def with_ones(v: mx.array) -> mx.array:
    """Values with a further one, always 1, whose sum is the sum of the keys: `(..., V + 1)`."""
    return mx.concatenate([v, mx.ones((*v.shape[:-1], 1), v.dtype)], axis=-1)


def attend_to_all(q: mx.array, k: mx.array, v: mx.array, valid: mx.array | None) -> mx.array:
    r"""Reads from the sum of all keys and values, :math:`o_t = q_t \sum_s k_s^\top v_s`.

    Args:
        q: `(B, H, L, K)`.
        k: `(B, H, N, K)`.
        v: `(B, H, N, V)`.
        valid: Booleans `(B, N)`, `False` at keys and values that do not count.
    """
    if valid is not None:
        mask = valid[:, None, :, None]
        k, v = (mx.where(mask, x, mx.zeros((), x.dtype)) for x in (k, v))
    return q @ (k.swapaxes(-1, -2) @ v)


def check_no_starts(caller: str, starts: mx.array | None) -> None:
    """Refuses packed samples in a mixer that sees the whole sequence.

    Raises:
        ValueError: There are some.
    """
    if starts is not None:
        raise ValueError(
            f"[{caller}] 'starts' must be None where 'is_causal' is False, since all of a row is seen, "
            "but got an array. Give each sample a row."
        )


def weights_of_kernel(q: mx.array, k: mx.array, *, is_causal: bool) -> mx.array:
    """Products of features of queries `(B, H, L, F)` and keys `(B, H, M, F)`, `(B, H, L, M)`."""
    weights = q @ k.swapaxes(-1, -2)
    return mx.tril(weights) if is_causal else weights


def weights_of_recurrence(q: mx.array, k: mx.array, f: mx.array | None) -> mx.array:
    r"""Mixing weights of `ops.gated_linear_attention`, unrolled from a state of zeros.

    .. math::
        A_{t,s} = q_t\,\Big(\prod_{r=s+1}^{t} \mathrm{diag}(f_r)\Big)\,k_s^\top, \quad s \le t

    Args:
        q: Queries `(B, H, L, K)`.
        k: Keys, of the same shape.
        f: Gates, `(B, H, L, K)` or `(B, H, L, 1)`; `None` stands for ones.

    Returns:
        float32 `(B, H, L, L)`.
    """
    batch, heads, length, dims = q.shape
    one_hot = mx.broadcast_to(mx.eye(length), (batch, heads, length, length))
    return gated_linear_attention(q, k, one_hot, f, mx.zeros((batch, heads, dims, length)))[0]
