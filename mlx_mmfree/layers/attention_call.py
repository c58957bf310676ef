"""What attention does between its projections with the tokens of a call, in the form that fits them."""

from itertools import pairwise
from typing import Any, TypeVar, cast

import mlx.core as mx

from ..ops import attention_step
from ..ops.slots import next_place
from ..ops.splitting import split_many
from .context import Context
from .key_value_kind import KeyValueKind
from .key_value_state import FixedKeyValueState, KeyValueState
from .padding import RealTokens
from .sequence_attention import Heads, attend

S = TypeVar("S", KeyValueState, FixedKeyValueState)
GrowingState = KeyValueState | tuple[()]
SelfAttentionState = GrowingState | FixedKeyValueState

PIECE = 256
"""Tokens that are read at a time at least, where a long call is read in pieces."""


def attend_call(
    projected: mx.array,
    state: SelfAttentionState,
    heads: Heads,
    kind: KeyValueKind,
    context: Context,
    tokens: RealTokens,
    *,
    place: str,
) -> tuple[mx.array, SelfAttentionState]:
    """Attention of the tokens of a call to each other and to those of a state.

    Args:
        projected: Heads of queries, keys and values, one behind the other, `(B, L, (H + 2G) K)`.
        state: The tokens before; `()` where attention is not causal.
        heads: What is done with the heads.
        kind: What can be done with the state.
        context: The call.
        tokens: Those of the call that are no padding.
        place: What reports that the tokens do not fit the state.

    Returns:
        `(B, L, H K)` and the state.
    """
    length = projected.shape[1]
    if not length:
        dims = heads.num_heads * projected.shape[2] // (heads.num_heads + 2 * heads.num_kv_heads)
        return mx.zeros((projected.shape[0], 0, dims), projected.dtype), state
    if isinstance(state, FixedKeyValueState):
        if tokens.counts is not None or tokens.starts is not None:
            raise ValueError(
                f"[{place}] 'x' must come without 'valid' and 'starts' while the state has fixed "
                "shapes. Make it ordinary by 'growing' of its kind."
            )
        # one by one, so that proposals of a draft model are read as ordinary tokens are
        pieces, first = list(pairwise(range(length + 1))), None
    elif length == 1 and heads.cache.quantization is None:
        return _attend(projected, state, heads, kind, context, tokens)
    else:
        pieces, first = _pieces(state, length, heads, kind)
    if first is not None and tokens.starts is not None:
        raise ValueError(
            f"[{place}] 'starts' must be None while the state is still to be quantised but got "
            f"{tokens.starts.shape}. Set 'quantization_start' to 0 or leave out the quantization."
        )
    parts = []
    cut = split_many(projected, [stop for _, stop in pieces[:-1]], axis=1)
    for piece, (start, stop) in zip(cut, pieces, strict=True):
        if start == first:
            state = kind.quantized(cast(KeyValueState, state))
        if len(pieces) == 1:
            return _attend(projected, state, heads, kind, context, tokens)
        one, own = context.part(start, stop), tokens.part(start, stop)
        y, state = _attend(piece, state, heads, kind, one, own)
        parts.append(y)
    return mx.concatenate(parts, axis=1), state


def _pieces(
    state: GrowingState, length: int, heads: Heads, kind: KeyValueKind
) -> tuple[list[tuple[int, int]], int | None]:
    """Where a call is cut to be read in pieces, and the piece before which the state is quantised.

    With a window, a token of a long call costs what one of a short call does. With a bias, the scores
    of a piece are alive at once rather than those of the call.
    """
    cuts, capacity = {0, length}, heads.cache.capacity
    first = None if heads.cache.quantization is None else kind.left_exact(state)
    if first is not None and first >= length:
        first = None
    if first is not None:
        cuts.add(first)
    if isinstance(state, KeyValueState):
        is_cut = capacity is not None or heads.position_bias is not None
        size = max(capacity or 0, PIECE)
        if is_cut and length > 2 * size:
            cuts |= set(range(size, length, size))
    return list(pairwise(sorted(cuts))), first


def _attend(
    projected: mx.array,
    state: SelfAttentionState,
    heads: Heads,
    kind: KeyValueKind,
    context: Context,
    tokens: RealTokens,
) -> tuple[mx.array, SelfAttentionState]:
    """Attention of the tokens of one piece."""
    if isinstance(state, FixedKeyValueState):
        return attend_step(projected, state, heads, context)
    is_plain = tokens.counts is None and tokens.starts is None
    if is_plain and projected.shape[1] == 1 and kind.takes_step(state):
        roomy = state.with_room(1, heads.cache.window, heads.cache.sinks)
        return attend_step(projected, roomy, heads, context)
    return attend(projected, state, heads, context, tokens)


def attend_step(
    projected: mx.array, state: S, heads: Heads, context: Context
) -> tuple[mx.array, S]:
    """Attention of one token to itself and those before it.

    Args:
        projected: Heads of its query, key and value, `(B, 1, (H + 2G) K)`.
        state: Exact keys and values, with room for the token.
        heads: What is done with the heads, by weights of plain softmax.
        context: The call.

    Returns:
        `(B, 1, H K)` and the state.
    """
    keys, values, positions = cast("tuple[mx.array, mx.array, mx.array]", state)
    window, sinks = heads.cache.window, heads.cache.sinks
    options: dict[str, Any] = {"window": window, "sinks": sinks}
    if heads.rope is not None:
        options["wavelengths"] = heads.rope.wavelengths
        options["is_interleaved"] = heads.rope.is_interleaved
    scale, query_norm, key_norm = heads.query_scale, heads.query_norm, heads.key_norm
    if query_norm is not None and key_norm is not None:
        weight = query_norm["weight"]
        options["query_norm"] = weight if scale == 1.0 else weight * scale
        options["key_norm"] = key_norm["weight"]
        options["norm_eps"] = query_norm.eps
    elif scale != 1.0:
        dims = heads.num_heads * keys.shape[-1]
        queries, others = mx.split(projected, [dims], axis=-1)
        projected = mx.concatenate([queries * scale, others], axis=-1)
    used, room = positions.shape[1], keys.shape[2]
    place = context.once(
        ("place", used, room, window, sinks),
        lambda: next_place(positions, room, window, sinks),
    )
    y, *new = attention_step(
        projected,
        keys,
        values,
        positions,
        num_heads=heads.num_heads,
        place=place,
        **options,
    )
    return y, type(state)(*new)
