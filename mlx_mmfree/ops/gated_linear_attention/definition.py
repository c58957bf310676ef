r"""Definitions of `gated_linear_attention`: position by position, and in chunks.

Within a chunk, position `t` meets position `s` before it with the weight
:math:`\sum_k q_{tk} k_{sk} \prod_{s < u \le t} f_{uk}`. For a boundary between the two, that product of
gates falls into one that belongs to `t` and one that belongs to `s`. So a chunk is halved, its later
half meets its earlier half in one product of matrices, and each half is halved again. What lies before
the chunk comes in by the state before it. These states are a linear scan with one step for each chunk.
"""

import mlx.core as mx

from ..backend.dispatch import use_any_backend
from ..backend.gradient import with_reference_gradient
from ..linear_scan import linear_scan
from ..splitting import positions

CHUNK_LENGTH = 64


def reference(
    q: mx.array, k: mx.array, v: mx.array, f: mx.array | None, state: mx.array
) -> tuple[mx.array, mx.array]:
    """One position after the other."""
    last, outputs = state.astype(mx.float32), []
    steps = [positions(x.astype(mx.float32), axis=2) for x in (q, k, v)]
    gates = [None] * q.shape[2] if f is None else positions(f.astype(mx.float32), axis=2)
    for query, key, value, gate in zip(*steps, gates, strict=True):
        if gate is not None:
            last = gate.swapaxes(-1, -2) * last
        last = last + key.swapaxes(-1, -2) * value
        outputs.append(query @ last)
    return mx.concatenate(outputs, axis=2).astype(v.dtype), last


def chunked(
    q: mx.array, k: mx.array, v: mx.array, f: mx.array | None, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Products of matrices, parallel over chunks of positions."""
    if q.shape[2] == 1:
        return reference(q, k, v, f, state)
    gates = () if f is None else (f,)
    o, last = _with_gradient(q, k, v, state, *gates)
    return o, last


def compute(
    q: mx.array, k: mx.array, v: mx.array, state: mx.array, f: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The operation in chunks, with everything in its graph stored for the gradient."""
    dtype, length = v.dtype, v.shape[2]
    # a power of two, since it is halved
    size = min(CHUNK_LENGTH, 1 << (length - 1).bit_length())
    q, k, v = (in_chunks(x, size) for x in (q, k, v))
    if f is None:
        weights = mx.tril(q @ k.swapaxes(-1, -2))
        whole = mx.ones((*q.shape[:3], 1, 1))
    else:
        weights, until, after = decayed_weights(q, k, in_chunks(f, size, padding=1.0))
        whole = until[..., -1:, :]
        q, k = q * until, k * after
    states, last = _states(whole, k.swapaxes(-1, -2) @ v, state)
    o = q @ states + weights @ v
    o = o.reshape(*o.shape[:2], -1, o.shape[-1])[:, :, :length]
    return o.astype(dtype), last


# chunks are computed anew for the gradient instead of being stored
_with_gradient = with_reference_gradient(compute, compute)


def in_chunks(x: mx.array, size: int, padding: float = 0.0) -> mx.array:
    """`(B, H, L, N)` in float32 as `(B, H, chunks, size, N)`; what is missing changes nothing."""
    x, missing = x.astype(mx.float32), -x.shape[2] % size
    if missing:
        x = mx.pad(x, [(0, 0), (0, 0), (0, missing), (0, 0)], constant_values=padding)
    return x.reshape(*x.shape[:2], -1, size, x.shape[-1])


def decayed_weights(q: mx.array, k: mx.array, f: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The weights between the positions of each chunk, and products of its gates.

    Returns:
        Weights `(..., size, size)`, zero above the diagonal; and in the shape of `f`, the product of
        the gates up to each position and its own, and the product of the gates after it.
    """
    if f.shape[-1] < q.shape[-1]:
        one = mx.ones(f.shape)
        decay, until, after = decayed_weights(one, one, f)
        return (q @ k.swapaxes(-1, -2)) * decay, until, after
    # blocks of one position, merged in pairs until a chunk is one block
    until, after = f[..., None, :], mx.ones(f.shape)[..., None, :]
    weights = (q * k).sum(axis=-1)[..., None, None]
    while weights.shape[-3] > 1:
        shape = (*f.shape[:-2], *until.shape[-3:])
        (first, second), (ends, rests) = pairs(until), pairs(after)
        later = pairs(q.reshape(shape))[1] * second
        earlier = pairs(k.reshape(shape))[0] * ends
        weights = merged(weights, _products(later, earlier))
        until = mx.concatenate([first, second * first[..., -1:, :]], axis=-2)
        after = mx.concatenate([ends * second[..., -1:, :], rests], axis=-2)
    return weights.squeeze(-3), until.squeeze(-3), after.squeeze(-3)


def pairs(x: mx.array) -> tuple[mx.array, mx.array]:
    """The first and the second of each pair of blocks, `(..., blocks, size, N)`."""
    x = x.reshape(*x.shape[:-3], -1, 2, *x.shape[-2:])
    first, second = mx.split(x, 2, axis=-3)
    return first.squeeze(-3), second.squeeze(-3)


def _products(later: mx.array, earlier: mx.array) -> mx.array:
    """The product of each row with each, within blocks."""
    if later.shape[-2] == 1:
        return (later * earlier).sum(axis=-1, keepdims=True)
    return later @ earlier.swapaxes(-1, -2)


def merged(weights: mx.array, between: mx.array) -> mx.array:
    """The weights within pairs of blocks: those within each, and of the second with the first."""
    first, second = pairs(weights)
    above = mx.concatenate([first, mx.zeros(first.shape)], axis=-1)
    return mx.concatenate([above, mx.concatenate([between, second], axis=-1)], axis=-2)


def _states(whole: mx.array, sums: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    """The states before each chunk, `(B, H, chunks, K, V)`, and the last one.

    Args:
        whole: Products of all gates of each chunk, `(B, H, chunks, 1, K)`, or one for each head.
        sums: What each chunk adds, `(B, H, chunks, K, V)`.
        state: The state before the first, `(B, H, K, V)`.
    """
    state = state.astype(mx.float32)
    gates = mx.broadcast_to(whole.swapaxes(-1, -2), sums.shape)
    rows = (state.shape[0] * state.shape[1], sums.shape[2], -1)
    # whatever backend is forced, this is its own operation
    with use_any_backend():
        after, last = linear_scan(
            gates.reshape(rows), sums.reshape(rows), state.reshape(rows[0], -1)
        )
    before = mx.concatenate([state[:, :, None], after.reshape(sums.shape)[:, :, :-1]], axis=2)
    return before, last.reshape(state.shape)
