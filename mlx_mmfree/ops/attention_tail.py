"""Attention of one token whose key and value go into a tail, so that no step writes into the cache.

MLX holds what a kernel reads until the GPU has finished. An update of the cache then copies all of it,
if the step before is still computed. The tail holds the last tokens instead and comes out of each step
anew; `join_tail` writes it into the cache once nothing is computed any more.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from .attention import attention
from .attention.metal_step import MAX_DIMS, one_token, parts_of
from .attention_step import Options, gated_result, token_heads, write_slots
from .attention_step import check as check_step
from .backend import self_check
from .backend.dispatch import FLOATS, Backend, Example, Operation
from .backend.gpu_cores import cores
from .backend.gradient import with_reference_gradient
from .backend.launch import SIMD_GROUP
from .rotated_heads import Rotation


class Tail(NamedTuple):
    """The last tokens, in the order of the text.

    Attributes:
        keys: Rotated keys `(B, G, T, K)`.
        values: `(B, G, T, K)`.
        used: The number of slots in use, int32 `(1,)`.
    """

    keys: mx.array
    values: mx.array
    used: mx.array

    @classmethod
    def empty(cls, keys: mx.array, slots: int) -> "Tail":
        """With so many slots, for a cache of these keys."""
        batch, groups, _, dims = keys.shape
        free = mx.zeros((batch, groups, slots, dims), keys.dtype)
        return cls(free, free, mx.zeros((1,), mx.int32))


class NextTailSlot(NamedTuple):
    """Where one more token goes, and what it sees.

    Attributes:
        lengths: The number of tokens before it in each row, int32 `(B,)`.
        starts: How many of them are in the cache, int32 `(B,)`.
        used: How many of them are in the tail, int32 `(1,)`.
        after: The same with the token.
        seen: Which slots of the cache it sees, booleans `(B, C)`.
    """

    lengths: mx.array
    starts: mx.array
    used: mx.array
    after: mx.array
    seen: mx.array


def next_tail_slot(
    positions: mx.array, used: mx.array, window: int | None = None, sinks: int = 0
) -> NextTailSlot:
    """Finds the slot of the next token.

    Args:
        positions: The position that each slot of the cache holds, int32 `(B, C)`, -1 for none.
        used: How many tokens follow them in the tail, int32 `(1,)`.
        window: The number of slots after the sinks, or `None` if all tokens stay.
        sinks: The number of first tokens that stay.
    """
    starts = mx.max(positions, axis=1) + 1
    lengths = starts + used
    seen = positions >= 0
    if window is not None:
        is_near = positions > lengths[:, None] - window
        seen = mx.logical_and(seen, mx.logical_or(is_near, positions < sinks))
    return NextTailSlot(lengths, starts, used, used + 1, seen)


def join_tail(
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    tail: Tail,
    count: int,
    window: int | None = None,
    sinks: int = 0,
) -> tuple[mx.array, mx.array, mx.array]:
    """The cache with the tokens of the tail in it, each in the slot that `attention_step` has for it.

    Args:
        keys: `(B, G, C, K)`, with slots for the tokens.
        values: `(B, G, C, K)`.
        positions: The position that each slot holds, int32 `(B, C)`, -1 for none.
        tail: The tokens after them.
        count: How many there are.
        window: The number of slots after the sinks, `T` at least, or `None` if all tokens stay.
        sinks: The number of first tokens that stay.

    Returns:
        The new keys, values and positions.
    """
    if not count:
        return keys, values, positions
    lengths = mx.max(positions, axis=1) + 1
    new_positions = lengths[:, None] + mx.arange(count)
    slots = new_positions
    if window is not None:
        slots = mx.where(
            new_positions < sinks, new_positions, sinks + (new_positions - sinks) % window
        )
    index = lengths if window is None and lengths.size == 1 else slots
    keys, values = (
        write_slots(cache, new[:, :, :count], index)
        for cache, new in ((keys, tail.keys), (values, tail.values))
    )
    return keys, values, mx.put_along_axis(positions, slots, new_positions, axis=1)


def attention_tail(
    projected: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    tail: Tail,
    options: Options,
) -> tuple[mx.array, Tail]:
    r"""Attention of one token to those in a cache and in a tail, and to itself.

    The formula is `attention_step`'s, where the tokens of the tail follow the cache's.

    Args:
        projected: As for `attention_step`, `(B, 1, (H + 2G) K)` or `(B, 1, (2H + 2G) K)`.
        keys: Rotated keys `(B, G, C, K)`. They are only read.
        values: `(B, G, C, K)`.
        positions: The position that each slot of the cache holds, int32 `(B, C)`, -1 for none.
        tail: The tokens after them, with a slot for another; with a window, as many as it has at most.
        options: The other arguments of `attention_step`; `slot` gives what `next_tail_slot` returns.

    Returns:
        `y`, `(B, 1, H K)` in the dtype of `projected`, and the tail with the token.

    Raises:
        ValueError: The shapes do not agree, heads or their dims are missing, or the tail has other sizes
            than the cache or more slots than the window.

    Example:
        >>> from mlx_mmfree.ops.attention_step import Options
        >>> keys, tail = mx.zeros((1, 1, 8, 4)), Tail.empty(mx.zeros((1, 1, 8, 4)), 2)
        >>> positions = mx.array([[0, 1, 2, -1, -1, -1, -1, -1]])
        >>> y, tail = attention_tail(mx.ones((1, 1, 16)), keys, keys, positions, tail, Options(2))
        >>> y.shape, tail.used.tolist()
        ((1, 1, 8), [1])
    """
    y, *after = operation(projected, keys, values, positions, tail, options)
    return y, Tail(*after)


def _check(
    projected: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    tail: Tail,
    options: Options,
) -> None:
    check_step(projected, keys, values, positions, options)
    batch, groups, capacity, dims = keys.shape
    most = tail.keys.shape[2] if options.window is None else options.window
    slots = tail.keys.shape[2]
    shape = (batch, groups, slots, dims)
    if not tail.keys.shape == tail.values.shape == shape or not 0 < slots <= most:
        raise ValueError(
            "[attention_tail] 'tail' must have keys and values (B, G, T, K) of the heads of 'keys', "
            f"with one slot at least and a window's at most, but got {tail.keys.shape} and "
            f"{tail.values.shape} for {keys.shape} and a window of {options.window}."
        )
    if positions.shape[1] != capacity:
        raise ValueError(
            f"[attention_tail] 'positions' must have shape ({batch}, {capacity}) but got "
            f"{positions.shape}."
        )


def reference(
    projected: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    tail: Tail,
    options: Options,
) -> tuple[mx.array, ...]:
    """The definition, in terms of `attention`."""
    slot = _next_tail_slot(positions, tail, options)
    q, k, v, gates = token_heads(projected, keys.shape[1], slot.lengths, options)
    tail_keys = write_slots(tail.keys, k.astype(keys.dtype), slot.used)
    tail_values = write_slots(tail.values, v.astype(values.dtype), slot.used)
    own = mx.arange(tail.keys.shape[2]) < slot.after
    own = mx.broadcast_to(own, (keys.shape[0], own.size))
    mask = mx.concatenate([slot.seen, own], axis=1)[:, None, None]
    y = attention(
        q,
        mx.concatenate([keys, tail_keys], axis=2),
        mx.concatenate([values, tail_values], axis=2),
        mask,
    )
    return gated_result(y, gates, projected.dtype), tail_keys, tail_values, slot.after


def _next_tail_slot(positions: mx.array, tail: Tail, options: Options) -> NextTailSlot:
    if options.slot is not None:
        return options.slot()
    return next_tail_slot(positions, tail.used, options.window, options.sinks)


def _metal(
    projected: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    tail: Tail,
    options: Options,
    parts: int | None = None,
) -> tuple[mx.array, ...]:
    """One launch, or two where the slots of a head are read in several parts."""
    slot = _next_tail_slot(positions, tail, options)
    if parts is None:
        parts = parts_of(keys.shape[0] * options.num_heads, keys.shape[2], cores())
    rotation = None
    if options.wavelengths is not None:
        given = options.angles
        rotation = given() if given else Rotation.of(slot.lengths, 1, options.wavelengths)
    angles = () if rotation is None else (rotation.cosines, rotation.sines)
    norms = [norm for norm in (options.query_norm, options.key_norm) if norm is not None]

    def run(projected: mx.array, *arrays: mx.array) -> Any:
        return one_token(
            projected,
            arrays[:2],
            arrays[2:4],
            (slot.starts, slot.seen if options.window is not None else slot.starts, slot.used),
            angles,
            arrays[4:],
            num_heads=options.num_heads,
            eps=options.norm_eps,
            is_interleaved=options.is_interleaved,
            is_gated=options.is_gated,
            is_windowed=options.window is not None,
            parts=parts,
        )

    def definition(projected: mx.array, *arrays: mx.array) -> Any:
        given = options._replace(slot=lambda: slot)
        if len(arrays) > 4:
            given = given._replace(query_norm=arrays[4], key_norm=arrays[5])
        stored = Tail(arrays[2], arrays[3], tail.used)
        y, *new, _ = reference(projected, arrays[0], arrays[1], positions, stored, given)
        return [*new, y]

    arrays = projected, keys, values, tail.keys, tail.values, *norms
    *new, y = with_reference_gradient(run, definition)(*arrays)
    return y, *new, slot.after


def fits(dims: int) -> bool:
    """Returns whether the Metal kernel takes heads of these dims."""
    return dims % SIMD_GROUP == 0 and dims <= MAX_DIMS


def _metal_unsupported(
    projected: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    tail: Tail,
    options: Options,
) -> str | None:
    norm, waves, dims = options.query_norm, options.wavelengths, keys.shape[3]
    for array in (projected, keys, values, norm, options.key_norm):
        if array is not None and array.dtype not in FLOATS:
            return f"an argument is {array.dtype}"
    if not fits(dims):
        return f"heads have {dims} dims"
    if keys.dtype != values.dtype:
        return "keys and values differ in their dtype"
    parts = parts_of(keys.shape[0] * options.num_heads, keys.shape[2], cores())
    variant: dict[str, Any] = {
        "projected": projected.dtype,
        "keys": keys.dtype,
        "norm": None if norm is None else norm.dtype,
        "dims": dims,
        "pairs": 0 if waves is None else waves.size,
        "is_interleaved": options.is_interleaved,
        "is_gated": options.is_gated,
        "is_windowed": options.window is not None,
    }
    faults = (
        self_check.kernel_fault(
            "attention_step" if count == 1 else "attention_step_parts",
            partial(_without_count, partial(_metal, parts=count)),
            partial(_without_count, reference),
            partial(_step_to_check, **variant),
            **variant,
        )
        for count in (1, *[2] * (parts > 1))
    )
    return next((fault for fault in faults if fault), None)


def _without_count(run: Callable[..., Sequence[mx.array]], *arguments: Any) -> list[mx.array]:
    return list(run(*arguments)[:3])


def _step_to_check(
    projected: mx.Dtype,
    keys: mx.Dtype,
    norm: mx.Dtype | None,
    dims: int,
    pairs: int,
    is_interleaved: bool,
    is_gated: bool,
    is_windowed: bool,
) -> tuple[Any, ...]:
    # a key head of two query heads, more slots than SIMD groups, and free ones after them
    batch, capacity, used, slots = 2, 40, 36, 20
    width = (6 if is_gated else 4) * dims

    def numbers(*shape: int) -> mx.array:
        count = mx.arange(batch * shape[0] * shape[1])
        return ((count * 37 % 101) / 50.0 - 1.0).reshape(batch, *shape)

    token = (numbers(1, width) * 1.1).astype(projected)
    cache, tail = (numbers(each, dims)[:, None].astype(keys) for each in (capacity, slots))
    in_use = mx.where(mx.arange(capacity) < used, mx.arange(capacity), -1)
    positions = mx.broadcast_to(in_use, (batch, capacity))
    scale = None if norm is None else (mx.arange(dims) % 3 + 1.0).astype(norm)
    waves = mx.arange(pairs) + 2.0 if pairs else None
    window = capacity if is_windowed else None
    options = Options(2, waves, is_interleaved, scale, scale, window=window, is_gated=is_gated)
    rest = Tail(tail, tail[:, :, ::-1], mx.array([17], mx.int32))
    return token, cache, 0.5 * cache, positions, rest, options


def _examples() -> Iterator[Example]:
    options = Options(num_heads=2, wavelengths=mx.ones((32,)))
    for dtype in FLOATS:
        for capacity in (2, 512):
            cache = mx.zeros((1, 1, capacity, 64), dtype)
            projected, positions = (
                mx.zeros((1, 1, 4 * 64), dtype),
                mx.zeros((1, capacity), mx.int32),
            )
            yield Example((projected, cache, cache, positions, Tail.empty(cache, 2), options))


operation = Operation(
    "attention_tail",
    _examples,
    check=_check,
    metal=Backend(_metal, _metal_unsupported),
    reference=reference,
)
