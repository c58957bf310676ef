"""What attention computes between its projections for one token."""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from ..backend.dispatch import dispatch
from ..slots import Place, slots_after


class Options(NamedTuple):
    """What `attention_step` hands on to its backends beside the arrays that it changes."""

    num_heads: int
    wavelengths: mx.array | None = None
    is_interleaved: bool = False
    query_norm: mx.array | None = None
    key_norm: mx.array | None = None
    norm_eps: float = 1e-6
    window: int | None = None
    sinks: int = 0
    place: Callable[[], Place] | None = None


def attention_step(
    projected: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    *,
    num_heads: int,
    wavelengths: mx.array | None = None,
    is_interleaved: bool = False,
    query_norm: mx.array | None = None,
    key_norm: mx.array | None = None,
    norm_eps: float = 1e-6,
    window: int | None = None,
    sinks: int = 0,
    place: Callable[[], Place] | None = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    r"""Attention of one token to those before it and itself, and the state that holds it.

    .. math::
        q_h &= R_p\,\mathrm{norm}_q(\hat q_h), \quad k_{p,g} = R_p\,\mathrm{norm}_k(\hat k_g) \\
        y_h &= \sum_j \mathrm{softmax}_j\big(q_h^\top k_{j,g(h)} / \sqrt{K}\big)\,v_{j,g(h)},
        \quad g(h) = \lfloor h\,G / H \rfloor

    Here :math:`R_p` rotates pairs by :math:`p / \lambda_i` (arXiv 2104.09864), and the position `p` of a
    row is one more than its last. The slots are those of `ops.slots`.

    Args:
        projected: Heads of queries :math:`\hat q`, keys :math:`\hat k` and values, one behind the
            other, `(B, 1, (H + 2G) K)`, any float dtype.
        keys: Rotated keys `(B, G, C, K)`, with room for the token. Memory that nothing else holds is
            written in place.
        values: `(B, G, C, K)`.
        positions: The position that each slot in use holds, int32 `(B, N)`, -1 for none. Only the
            last one of a row counts. Where all slots are in use, `N = C`, each row has a free one or
            its window is full. A token for which there is no slot takes the last.
        num_heads: `H`, a multiple of `G`.
        wavelengths: Positions per radian of each pair, :math:`\lambda`, float32 `(K / 2,)`, or `None`
            for no rotation.
        is_interleaved: Whether pairs are neighbours `(2i, 2i + 1)`. Otherwise they are
            `(i, i + K / 2)`.
        query_norm: Weight of an RMSNorm of each query head, `(K,)`, or `None` for no norm.
        key_norm: Weight of an RMSNorm of each key head, `(K,)`, given together with `query_norm`.
        norm_eps: Epsilon of both norms.
        window: The number of slots behind the sinks, of which the oldest is overwritten, or `None` if
            all tokens stay.
        sinks: The number of first tokens that stay.
        place: Gives what `next_place` returns for the positions, where layers share it. A kernel that
            finds the place itself does not ask.

    Returns:
        `y`, `(B, 1, H K)` in the dtype of `projected`, the new keys and values with the shapes and
        dtypes that they had, and the new positions, int32 `(B, N + 1)`, or `(B, N)` once all slots are
        in use.

    Raises:
        ValueError: The shapes do not agree, heads or their dims are missing, there are more positions
            than slots, or sinks and window together are not below `2 ** 31`.

    Example:
        >>> keys, values = mx.zeros((1, 1, 8, 4)), mx.zeros((1, 1, 8, 4))
        >>> positions = mx.array([[0, 1, 2]])
        >>> y, *_, positions = attention_step(
        ...     mx.ones((1, 1, 16)), keys, values, positions, num_heads=2
        ... )
        >>> y.shape, positions.tolist()
        ((1, 1, 8), [[0, 1, 2, 3]])
    """
    options = Options(
        num_heads, wavelengths, is_interleaved, query_norm, key_norm, norm_eps, window, sinks, place
    )
    if keys.size == 0:
        check(projected, keys, values, positions, options)
        used = min(slots_after(positions.shape[1], 1, window, sinks), keys.shape[2])
        y = mx.zeros((0, 1, num_heads * keys.shape[3]), projected.dtype)
        return y, keys, values, mx.zeros((0, used), mx.int32)
    y, keys, values, positions = dispatch(__name__, projected, keys, values, positions, options)
    return y, keys, values, positions


def check(
    projected: mx.array, keys: mx.array, values: mx.array, positions: mx.array, options: Options
) -> None:
    """Refuses what `attention_step` cannot compute, with `ValueError`."""
    num_heads, window, sinks = options.num_heads, options.window, options.sinks
    if keys.ndim != 4 or num_heads < 1 or 0 in (keys.shape[1], keys.shape[3]):
        raise ValueError(
            "[attention_step] 'keys' must have shape (B, G, C, K) with heads of one dim at least but "
            f"got {keys.shape} for {num_heads} heads."
        )
    batch, groups, room, dims = keys.shape
    if (window is not None and window < 1) or sinks < 0 or (window or 0) + sinks >= 2**31:
        raise ValueError(
            "[attention_step] 'window' must be positive, 'sinks' not negative, and both together "
            f"below 2**31, but got {window} and {sinks}."
        )
    if num_heads % groups or projected.shape != (batch, 1, (num_heads + 2 * groups) * dims):
        raise ValueError(
            f"[attention_step] 'projected' and 'keys' must have shapes (B, 1, (H + 2G) K) and "
            f"(B, G, C, K) but got {projected.shape} and {keys.shape} for {num_heads} heads."
        )
    if values.shape != keys.shape or not positions.shape[1] <= room > 0:
        raise ValueError(
            "[attention_step] 'keys' and 'values' must have a slot for each of 'positions', and one "
            f"at least, but got shapes {keys.shape}, {values.shape} and {positions.shape}."
        )
    if (options.query_norm is None) != (options.key_norm is None):
        raise ValueError("[attention_step] 'query_norm' and 'key_norm' must be given together.")
    if positions.ndim != 2 or positions.shape[0] != batch:
        raise ValueError(
            f"[attention_step] 'positions' must have shape ({batch}, N) but got {positions.shape}."
        )
