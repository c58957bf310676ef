"""Attention of one token, between its projections, and the slots that hold tokens.

Slot `j` of a row holds its token `j`. With a window of W slots after S sinks, slot `S + j` holds the
latest token `S + p` with `p % W == j`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from .attention import attention
from .backend.cost import Call, Cost, meeting, norm_work, softmax_work, work
from .backend.dispatch import FLOATS, Arrays, Backend, Example, Operation, native_kernel
from .rotated_heads import Rotation


class NextSlot(NamedTuple):
    """Where one more token goes in buffers that hold these positions.

    Attributes:
        lengths: The number of tokens before it in each row, int32 `(B,)`.
        slots: Its slot, as `new_slots` returns it.
        positions: The position that each slot in use holds afterwards, int32 `(B, N)`, -1 for none.
        mask: Which slots it sees, booleans `(B, 1, 1, N)`.
    """

    lengths: mx.array
    slots: mx.array
    positions: mx.array
    mask: mx.array


def next_slot(
    positions: mx.array, capacity: int, window: int | None = None, sinks: int = 0
) -> NextSlot:
    """Finds the slot of the next token.

    Args:
        positions: The position that each slot in use holds, int32 `(B, N)`, -1 for none.
        capacity: The number of slots. A token for which there is none takes the last.
        window: The number of slots after the sinks, of which the oldest is overwritten, or `None` if
            all tokens stay.
        sinks: The number of first tokens that stay.
    """
    batch, used = positions.shape
    lengths = mx.max(positions, axis=1) + 1 if used else mx.zeros((batch,), mx.int32)
    count = min(slots_after(used, 1, window, sinks), capacity)
    stored = slot_positions(lengths + 1, count, window, sinks)
    # MLX writes past the end of a buffer without a word
    slots = mx.minimum(new_slots(lengths, 1, window, sinks), capacity - 1)
    return NextSlot(lengths, slots, stored, (stored >= 0)[:, None, None])


def slots_after(used: int, length: int, window: int | None, sinks: int) -> int:
    """The number of slots in use once `length` tokens follow the tokens of `used` slots."""
    return used + length if window is None else min(used + length, sinks + window)


def new_slots(
    lengths: int | mx.array, length: int, window: int | None = None, sinks: int = 0
) -> mx.array:
    """The slots of the next `length` tokens in rows of these lengths.

    Args:
        lengths: One number for all rows, or int32 `(B,)`.
        length: The number of tokens, which take slots one after the other.
        window: The number of slots after the sinks, or `None` if all tokens stay.
        sinks: The number of first tokens that stay.

    Returns:
        The first slot, int32 `(1,)`, if it is the same for all rows. Otherwise all, `(B, length)`.
    """
    first = mx.array([lengths], mx.int32) if isinstance(lengths, int) else lengths
    if window is not None:
        first = mx.where(first < sinks, first, sinks + (first - sinks) % window)
    return first if first.size == 1 else first[:, None] + mx.arange(length)


def slot_positions(lengths: mx.array, slots: int, window: int | None, sinks: int) -> mx.array:
    """The position that each slot holds in rows of these lengths, `(B, slots)`, or -1 for none."""
    slot, last = mx.arange(slots), lengths[:, None] - 1
    position = slot
    if window is not None:
        # the latest position that falls on the slot
        position = mx.where(slot < sinks, slot, last - (last - slot) % window)
    # not `&`, which MLX maps wrongly
    is_filled = mx.logical_and(position >= slot, position <= last)
    return mx.where(is_filled, position, -1)


def write_slots(buffer: mx.array, new: mx.array, slots: mx.array) -> mx.array:
    """The buffer with `new` written along axis 2 to the slots that `new_slots` returns."""
    if slots.size == 1:
        return mx.slice_update(buffer, new, slots.reshape(1), axes=(2,))
    index = mx.broadcast_to(slots[:, None, :, None], new.shape)
    return mx.put_along_axis(buffer, index, new, axis=2)


class Options(NamedTuple):
    """The options of `attention_step` and `attention_tail`, beside the arrays that they change."""

    num_heads: int
    wavelengths: mx.array | None = None
    is_interleaved: bool = False
    query_norm: mx.array | None = None
    key_norm: mx.array | None = None
    norm_eps: float = 1e-6
    window: int | None = None
    sinks: int = 0
    slot: Callable[[], Any] | None = None
    angles: Callable[[], Rotation] | None = None
    is_gated: bool = False


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
    slot: Callable[[], NextSlot] | None = None,
    angles: Callable[[], Rotation] | None = None,
    is_gated: bool = False,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    r"""Attention of one token to those before it and itself, and the state that holds it.

    .. math::
        q_h &= R_p\,\mathrm{norm}_q(\hat q_h), \quad k_{p,g} = R_p\,\mathrm{norm}_k(\hat k_g) \\
        y_h &= \sum_j \mathrm{softmax}_j\big(q_h^\top k_{j,g(h)} / \sqrt{K}\big)\,v_{j,g(h)},
        \quad g(h) = \lfloor h\,G / H \rfloor

    Here :math:`R_p` rotates pairs by :math:`p / \lambda_i` (arXiv 2104.09864), and the position `p` of a
    row is one more than its last. The slots are as in `ops.attention_step`.

    Args:
        projected: Heads of queries :math:`\hat q`, keys :math:`\hat k` and values, one after the
            other, `(B, 1, (H + 2G) K)`, any float dtype.
        keys: Rotated keys `(B, G, C, K)`, with a slot for the token. Memory that nothing else holds is
            written in place.
        values: `(B, G, C, K)`.
        positions: The position that each slot in use holds, int32 `(B, N)`, -1 for none. Only the
            last one of a row counts. Where all slots are in use, `N = C`, each row has a free one or
            its window is full. A token for which there is no slot takes the last.
        num_heads: `H`, a multiple of `G`.
        wavelengths: Positions per radian of each pair, :math:`\lambda`, float32 `(R / 2,)`, for the
            first `R` dims of a head, or `None` for no rotation.
        is_interleaved: Whether pairs are neighbours `(2i, 2i + 1)`. Otherwise they are
            `(i, i + R / 2)`.
        query_norm: Weight of an RMSNorm of each query head, `(K,)`, or `None` for no norm.
        key_norm: Weight of an RMSNorm of each key head, `(K,)`, given together with `query_norm`.
        norm_eps: Epsilon of both norms.
        window: The number of slots after the sinks, of which the oldest is overwritten, or `None` if
            all tokens stay.
        sinks: The number of first tokens that stay.
        slot: Gives what `next_slot` returns for the positions, where layers share it. A kernel that
            finds the slot itself does not ask.
        angles: Gives the rotation of the token, where layers share it. A kernel that
            computes it itself does not ask.
        is_gated: Each head of queries has a gate :math:`g_h` as wide after it, and :math:`y_h` is
            multiplied by :math:`\sigma(g_h)`; `projected` is `(B, 1, (2H + 2G) K)` then.

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
        num_heads,
        wavelengths,
        is_interleaved,
        query_norm,
        key_norm,
        norm_eps,
        window,
        sinks,
        slot,
        angles,
        is_gated,
    )
    if keys.size == 0:
        check(projected, keys, values, positions, options)
        used = min(slots_after(positions.shape[1], 1, window, sinks), keys.shape[2])
        y = mx.zeros((0, 1, num_heads * keys.shape[3]), projected.dtype)
        return y, keys, values, mx.zeros((0, used), mx.int32)
    y, keys, values, positions = operation(projected, keys, values, positions, options)
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
    batch, groups, capacity, dims = keys.shape
    if (window is not None and window < 1) or sinks < 0 or (window or 0) + sinks >= 2**31:
        raise ValueError(
            "[attention_step] 'window' must be positive, 'sinks' not negative, and both together "
            f"below 2**31, but got {window} and {sinks}."
        )
    queries = 2 * num_heads if options.is_gated else num_heads
    if num_heads % groups or projected.shape != (batch, 1, (queries + 2 * groups) * dims):
        width = "2H + 2G" if options.is_gated else "H + 2G"
        raise ValueError(
            f"[attention_step] 'projected' and 'keys' must have shapes (B, 1, ({width}) K) and "
            f"(B, G, C, K) but got {projected.shape} and {keys.shape} for {num_heads} heads."
        )
    if values.shape != keys.shape or not positions.shape[1] <= capacity > 0:
        raise ValueError(
            "[attention_step] 'keys' and 'values' must have a slot for each of 'positions', and one "
            f"at least, but got shapes {keys.shape}, {values.shape} and {positions.shape}."
        )
    waves = options.wavelengths
    if waves is not None and not 0 < 2 * waves.size <= dims:
        raise ValueError(
            f"[attention_step] 'wavelengths' must be of 1 to {dims // 2} pairs of a head's dims but got "
            f"{waves.size}."
        )
    if (options.query_norm is None) != (options.key_norm is None):
        raise ValueError("[attention_step] 'query_norm' and 'key_norm' must be given together.")
    if positions.ndim != 2 or positions.shape[0] != batch:
        raise ValueError(
            f"[attention_step] 'positions' must have shape ({batch}, N) but got {positions.shape}."
        )


def reference(
    projected: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    options: Options,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """The definition, in terms of `attention`."""
    slot = _next_slot(positions, keys.shape[2], options)
    q, k, v, gates = token_heads(projected, keys.shape[1], slot.lengths, options)
    keys = write_slots(keys, k.astype(keys.dtype), slot.slots)
    values = write_slots(values, v.astype(values.dtype), slot.slots)
    count = slot.positions.shape[1]
    y = attention(q, keys[:, :, :count], values[:, :, :count], slot.mask)
    return gated_result(y, gates, projected.dtype), keys, values, slot.positions


def _next_slot(positions: mx.array, capacity: int, options: Options) -> NextSlot:
    if options.slot is not None:
        return options.slot()
    return next_slot(positions, capacity, options.window, options.sinks)


def token_heads(
    projected: mx.array, groups: int, lengths: mx.array, options: Options
) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
    """The heads of a token that follows so many of its row, normed and rotated.

    Returns:
        Queries `(B, H, 1, K)`, keys and values `(B, G, 1, K)`, and gates `(B, 1, H K)` or `None`.
    """
    batch, num_heads, gates = projected.shape[0], options.num_heads, None
    widths = (2 if options.is_gated else 1) * num_heads + 2 * groups
    dims = projected.shape[2] // widths
    if options.is_gated:
        projected, gates = without_gates(projected, num_heads, dims)
    heads = projected.reshape(batch, -1, 1, dims)
    if options.query_norm is not None:
        q, k, v = mx.split(heads, [num_heads, num_heads + groups], axis=1)
        q = mx.fast.rms_norm(q, options.query_norm, options.norm_eps)
        k = mx.fast.rms_norm(k, options.key_norm, options.norm_eps)
        heads = mx.concatenate([q, k, v], axis=1)
    turned = heads[:, : num_heads + groups]
    if options.wavelengths is not None:
        # queries and keys in one operation
        turned = mx.fast.rope(
            turned,
            2 * options.wavelengths.size,
            traditional=options.is_interleaved,
            base=None,
            scale=1.0,
            offset=lengths,
            freqs=options.wavelengths,
        )
    q, k = mx.split(turned, [num_heads], axis=1)
    return q, k, heads[:, num_heads + groups :], gates


def gated_result(y: mx.array, gates: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """The heads `(B, H, 1, K)` side by side, `(B, 1, H K)`, times the sigmoid of their gates."""
    y = y.reshape(y.shape[0], 1, -1)
    return (y if gates is None else y * mx.sigmoid(gates)).astype(dtype)


def without_gates(projected: mx.array, num_heads: int, dims: int) -> tuple[mx.array, mx.array]:
    """Queries, keys and values `(B, L, (H + 2G) K)`, and the gates of the heads, `(B, L, H K)`."""
    both, others = mx.split(projected, [2 * num_heads * dims], axis=-1)
    heads = mx.unflatten(both, -1, (num_heads, 2, dims))
    queries, gates = (mx.flatten(part, 2) for part in mx.split(heads, 2, axis=3))
    return mx.concatenate([queries, others], axis=-1), gates


def native(
    projected: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    options: Options,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """C++, in which each key and value is read once for all heads that share it."""
    *others, window, sinks, _, _, is_gated = options
    gates = None
    if is_gated:
        projected, gates = without_gates(projected, options.num_heads, keys.shape[3])
    y, keys, values, positions = _kernel()(
        projected, keys, values, positions, *others, window, sinks
    )
    return y if gates is None else y * mx.sigmoid(gates), keys, values, positions


def _unsupported(
    projected: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    options: Options,
) -> str | None:
    for array in (projected, keys, values, options.query_norm, options.key_norm):
        if array is not None and array.dtype not in FLOATS:
            return f"an argument is {array.dtype}"
    if options.wavelengths is not None and options.wavelengths.dtype != mx.float32:
        return f"'wavelengths' are {options.wavelengths.dtype}"
    return None


def _definition(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    projected, keys, values, positions, wavelengths, query_norm, key_norm = arrays
    num_heads, is_interleaved, norm_eps, window, sinks = options
    given = Options(
        num_heads,
        wavelengths,
        is_interleaved,
        query_norm,
        key_norm,
        norm_eps,
        window or None,
        sinks,
    )
    return reference(projected, keys, values, positions, given)


def _cost(call: Call) -> Cost:
    _, keys, values, _, wavelengths, query_norm, _ = call.arguments
    num_heads = call.options[0]
    batch, groups, _, dims = keys.shape
    used = call.outputs[3].shape[1]
    turned = batch * (num_heads + groups)
    scores = meeting(1, dims, used, batch * num_heads, (0, 1))
    mixed = meeting(1, used, dims, batch * num_heads, (0, 2))
    total = scores.work + mixed.work + softmax_work(batch * num_heads * used)
    # queries are scaled, and each slot's position is looked at
    total += work(multiply=batch * num_heads * dims, integer=batch * used)
    if query_norm is not None:
        total += norm_work(turned, dims, True)
    if wavelengths is not None:
        angles, rotated = batch * wavelengths.size, 2 * wavelengths.size
        total += work(other=3 * angles, multiply=2 * turned * rotated, add=turned * rotated)
    slot = batch * groups * dims
    read = {1: used * slot * keys.itemsize, 2: used * slot * values.itemsize}
    written = {1: slot * keys.itemsize, 2: slot * values.itemsize}
    return Cost(total, (scores, mixed), read, written)


def _examples() -> Iterator[Example]:
    options = Options(num_heads=2, wavelengths=mx.ones((32,)))
    for dtype in FLOATS:
        buffer = mx.zeros((1, 1, 2, 64), dtype)
        projected, positions = mx.zeros((1, 1, 4 * 64), dtype), mx.zeros((1, 1), mx.int32)
        yield Example((projected, buffer, buffer, positions, options))


_kernel = native_kernel("attention_step", _definition)
operation = Operation(
    "attention_step",
    _examples,
    check=check,
    costs={"AttentionStep": _cost},
    native=Backend(native, _unsupported, refuses=True),
    metal=reference,
    chunked=reference,
    reference=reference,
)
