r"""Definitions of `gated_delta_rule`: position by position, and parallel over chunks but for the states.

What a position reads under :math:`a_t` depends on what earlier positions of its chunk took away. Let
:math:`A` hold the weights with which the positions of a chunk read each other, zero on the diagonal and
above. Then what all of them take away is one product with :math:`(I + A)^{-1}`, which is found in
halves, as are the weights (see `gated_linear_attention.definition`). The state goes from chunk to chunk
by two products. All the rest is computed for all chunks at once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx

from ..backend.gradient import with_reference_gradient
from ..gated_linear_attention.definition import (
    CHUNK_LENGTH,
    decayed_weights,
    in_chunks,
    joined,
    pairs,
)
from ..splitting import positions


def reference(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    f: mx.array,
    state: mx.array,
    b: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """One position after the other. What is read under `a` is taken away under `b`, or under `k`."""
    last, outputs = state, []
    steps = [positions(x, axis=2) for x in (q, k, v, a, f, k if b is None else b)]
    for query, key, value, read, gate, removed in zip(*steps, strict=True):
        under_key = read @ last
        last = gate.swapaxes(-1, -2) * last
        if b is None:
            last = last + key.swapaxes(-1, -2) * (value - under_key)
        else:
            last = last + key.swapaxes(-1, -2) * value - removed.swapaxes(-1, -2) * under_key
        outputs.append(query @ last)
    return mx.concatenate(outputs, axis=2), last


class Chunks(NamedTuple):
    """Arrays that are computed for all chunks at once, each `(B, H, chunks, ...)`.

    With the state `S` before a chunk, its outputs are `queries S + outputs`, and the state after it is
    `gates * S - keys.T (reads S) + added`.

    Attributes:
        gates: Products of all gates of a chunk, `(K, 1)` or `(1, 1)`.
        keys: `(C, K)`.
        reads: `(C, K)`.
        added: `(K, V)`.
        queries: `(C, K)`.
        outputs: `(C, V)`.
    """

    gates: mx.array
    keys: mx.array
    reads: mx.array
    added: mx.array
    queries: mx.array
    outputs: mx.array


def chunked(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    f: mx.array,
    state: mx.array,
    b: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    if q.shape[2] == 1:
        return reference(q, k, v, a, f, state, b)
    o, last = _with_gradient(q, k, v, a, f, state, *([] if b is None else [b]))
    return o, last


Lead = Callable[..., tuple[mx.array, mx.array]]
"""As `lead`."""


def lead(
    gates: mx.array, keys: mx.array, reads: mx.array, added: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The state before each chunk, `(B, H, chunks, K, V)`, and the last one."""
    states = [state]
    for number in range(gates.shape[2]):
        own = (x[:, :, number] for x in (gates, keys, reads, added))
        gate, key, read, more = own
        last = states[-1]
        states.append(gate * last - key.swapaxes(-1, -2) @ (read @ last) + more)
    return mx.stack(states[:-1], axis=2), states[-1]


def lead_gradient(
    inputs: Sequence[mx.array],
    cotangents: Sequence[mx.array],
    outputs: Sequence[mx.array],
    lead: Lead,
) -> tuple[mx.array, ...]:
    """The gradient of `lead`: it is led backwards, where keys and reads change places."""
    gates, keys, reads, _, _ = inputs
    backwards = (x[:, :, ::-1] for x in (gates, reads, keys, cotangents[0]))
    after, d_state = lead(*backwards, cotangents[1])
    # the gradients of the states after the chunks
    after, before = after[:, :, ::-1], outputs[0]
    of_gates = (after * before).sum(axis=-1, keepdims=True)
    if gates.shape[3] == 1:
        of_gates = of_gates.sum(axis=-2, keepdims=True)
    of_keys = -(reads @ before) @ after.swapaxes(-1, -2)
    of_reads = -(keys @ after) @ before.swapaxes(-1, -2)
    return of_gates, of_keys, of_reads, after, d_state


def compute(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    f: mx.array,
    state: mx.array,
    b: mx.array | None = None,
    *,
    lead: Lead = lead,
) -> tuple[mx.array, mx.array]:
    """The operation in chunks, with everything in its graph kept for the gradient."""
    chunks = parallel_part(q, k, v, a, f, b)
    before, last = lead(*chunks[:4], state)
    o = chunks.queries @ before + chunks.outputs
    return o.reshape(*o.shape[:2], -1, o.shape[-1])[:, :, : v.shape[2]], last


def gradient(
    inputs: Sequence[mx.array],
    cotangents: Sequence[mx.array],
    outputs: Sequence[mx.array],
    *,
    lead: Lead = lead,
) -> tuple[mx.array, ...]:
    """The gradient, for which chunks are computed anew instead of being kept."""
    # otherwise mx.compile joins that with the forward pass and loses arrays of it
    anew = mx.depends(list(inputs), list(cotangents))
    return tuple(mx.vjp(partial(compute, lead=lead), anew, list(cotangents))[1])


_with_gradient = with_reference_gradient(compute, compute, gradient, is_differentiable=True)


def parallel_part(
    q: mx.array, k: mx.array, v: mx.array, a: mx.array, f: mx.array, b: mx.array | None
) -> Chunks:
    """All that needs no state. The last chunk is filled up with what changes nothing."""
    length = v.shape[2]
    # a power of two, since it is halved
    size = min(CHUNK_LENGTH, 1 << (length - 1).bit_length())
    q, k, v, a = (in_chunks(x, size) for x in (q, k, v, a))
    f = in_chunks(f, size, padding=1.0)
    removed = k if b is None else in_chunks(b, size)
    seen_k, until, after = decayed_weights(q, k, f)
    # what is read before the state decays meets the gates before its own
    earlier, before = _moved(a, 1), _moved(until, -1, filling=1.0)
    read_k = _moved(decayed_weights(earlier, k, f)[0], -1)
    read_b, seen_b = read_k, seen_k
    if b is not None:
        read_b = _moved(decayed_weights(earlier, removed, f)[0], -1)
        seen_b = decayed_weights(q, removed, f)[0]
    inverse = _inverse(read_b)
    keys, reads = removed * after, inverse @ (a * before)
    taken = v if b is None else -(read_k @ v)
    values = inverse @ taken
    outputs, added = seen_b @ values, keys.swapaxes(-1, -2) @ values
    if b is not None:
        outputs, added = outputs + seen_k @ v, added + (k * after).swapaxes(-1, -2) @ v
    gates = until[..., -1:, :].swapaxes(-1, -2)
    return Chunks(gates, keys, reads, added, q * until - seen_b @ reads, outputs)


def _moved(x: mx.array, places: int, filling: float = 0.0) -> mx.array:
    """The rows `(..., C, N)` one place earlier, 1, or later, -1."""
    row = mx.full((*x.shape[:-2], 1, x.shape[-1]), filling)
    if places > 0:
        return mx.concatenate([x[..., 1:, :], row], axis=-2)
    return mx.concatenate([row, x[..., :-1, :]], axis=-2)


def _inverse(lower: mx.array) -> mx.array:
    """The inverse of the identity plus a matrix `(..., C, C)` that is zero on its diagonal and above."""
    size = lower.shape[-1]
    inverse = mx.ones((*lower.shape[:-2], size, 1, 1))
    while (half := inverse.shape[-1]) < size:
        blocks = lower.reshape(*lower.shape[:-2], -1, 2 * half, size // (2 * half), 2 * half)
        own = mx.moveaxis(mx.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        first, second = pairs(inverse)
        inverse = joined(inverse, -(second @ (own[..., half:, :half] @ first)))
    return inverse.squeeze(-3)
