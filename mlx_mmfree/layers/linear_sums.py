"""What mixers share that attend by sums of keys and values instead of weights between positions."""

import mlx.core as mx


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
