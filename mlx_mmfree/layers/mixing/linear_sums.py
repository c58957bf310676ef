"""What mixers share that attend by sums of keys and values, and the weights that these stand for."""

import mlx.core as mx

from ...ops import gated_linear_attention


def with_ones(v: mx.array) -> mx.array:
    """Values with a further one, always 1, whose sum is that of the keys: `(..., V + 1)`."""
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
        place = valid[:, None, :, None]
        k, v = (mx.where(place, x, mx.zeros((), x.dtype)) for x in (k, v))
    return q @ (k.swapaxes(-1, -2) @ v)


def check_no_starts(place: str, starts: mx.array | None) -> None:
    """Refuses packed samples in a mixer that sees the whole sequence.

    Raises:
        ValueError: There are some.
    """
    if starts is not None:
        raise ValueError(
            f"[{place}] 'starts' must be None where 'is_causal' is False, since all of a row is seen, "
            "but got an array. Give each sample a row."
        )


def weights_of_kernel(q: mx.array, k: mx.array, *, is_causal: bool) -> mx.array:
    """Products of features of queries `(B, H, L, F)` and keys `(B, H, M, F)`, `(B, H, L, M)`."""
    weights = q @ k.swapaxes(-1, -2)
    return mx.tril(weights) if is_causal else weights


def weights_of_recurrence(q: mx.array, k: mx.array, f: mx.array | None) -> mx.array:
    r"""Those of `ops.gated_linear_attention`, unrolled from a state of zeros.

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
