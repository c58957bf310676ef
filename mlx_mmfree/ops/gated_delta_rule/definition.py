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
    merged,
    pairs,
)
from ..splitting import positions


class Inputs(NamedTuple):
    """The arrays that backends take, all float32.

    Attributes:
        q: Queries `(B, H, L, K)`.
        k: Keys, times how much is replaced.
        v: Values `(B, H, L, V)`.
        a: What the state is read under before it is written, `(B, H, L, K)`.
        f: Gates, `(B, H, L, K)` or `(B, H, L, 1)`.
        state: The state before, `(B, H, K, V)`.
        b: What the result of that reading is taken away under, `(B, H, L, K)`; `None`: under `k`.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    a: mx.array
    f: mx.array
    state: mx.array
    b: mx.array | None = None


def reference(*arrays: mx.array) -> tuple[mx.array, mx.array]:
    """One position after the other, of `Inputs`."""
    q, k, v, a, f, state, b = Inputs(*arrays)
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

    With the state `S` before a chunk, its positions write `written = values - reads S`. The state after
    it is `gates * S + keys.T written + added`, and its outputs are `queries S + weights written +
    outputs`.

    Attributes:
        gates: Products of all gates of a chunk, `(K, 1)` or `(1, 1)`.
        keys: `(C, K)`.
        reads: `(C, K)`.
        values: `(C, V)`.
        queries: `(C, K)`.
        weights: `(C, C)`.
        added: `(K, V)`; `None` stands for zeros.
        outputs: `(C, V)`; `None` stands for zeros.
    """

    gates: mx.array
    keys: mx.array
    reads: mx.array
    values: mx.array
    queries: mx.array
    weights: mx.array
    added: mx.array | None = None
    outputs: mx.array | None = None


def chunked(*arrays: mx.array) -> tuple[mx.array, mx.array]:
    if Inputs(*arrays).q.shape[2] == 1:
        return reference(*arrays)
    o, last = _with_gradient(*arrays)
    return o, last


Lead = Callable[..., tuple[mx.array, mx.array, mx.array]]
"""Like `lead`."""


def lead(
    gates: mx.array,
    keys: mx.array,
    reads: mx.array,
    values: mx.array,
    state: mx.array,
    added: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """The state before each chunk, `(B, H, chunks, K, V)`, what is written, and the last state."""
    states, written = [state], []
    for number in range(gates.shape[2]):
        own = (x[:, :, number] for x in (gates, keys, reads, values))
        gate, key, read, value = own
        last = states[-1]
        written.append(value - read @ last)
        last = gate * last + key.swapaxes(-1, -2) @ written[-1]
        states.append(last if added is None else last + added[:, :, number])
    return mx.stack(states[:-1], axis=2), mx.stack(written, axis=2), states[-1]


def lead_gradient(
    inputs: Sequence[mx.array],
    cotangents: Sequence[mx.array],
    outputs: Sequence[mx.array],
    lead: Lead,
) -> tuple[mx.array, ...]:
    """The gradient of `lead`: it is led backwards, where keys and reads are exchanged."""
    gates, keys, reads, _, _, *added = inputs
    before, written, _ = outputs
    d_before, d_written, d_last = cotangents
    backwards = (x[:, :, ::-1] for x in (gates, reads, keys, -d_written))
    after, falling, d_state = lead(*backwards, d_last, d_before[:, :, ::-1])
    # the gradients of the states after the chunks, and of what is written, with the other sign
    after, falling = after[:, :, ::-1], falling[:, :, ::-1]
    of_gates = (after * before).sum(axis=-1, keepdims=True)
    if gates.shape[3] == 1:
        of_gates = of_gates.sum(axis=-2, keepdims=True)
    of_keys = written @ after.swapaxes(-1, -2)
    of_reads = falling @ before.swapaxes(-1, -2)
    return of_gates, of_keys, of_reads, -falling, d_state, *(after for _ in added)


def compute(*arrays: mx.array, lead: Lead = lead) -> tuple[mx.array, mx.array]:
    """The operation in chunks, with everything in its graph stored for the gradient."""
    inputs = Inputs(*arrays)
    return led(parallel_part(inputs, inverse_of), inputs.state, inputs.v.shape[2], lead)


def led(chunks: Chunks, state: mx.array, length: int, lead: Lead) -> tuple[mx.array, mx.array]:
    """The outputs of so many positions, and the last state."""
    added = () if chunks.added is None else (chunks.added,)
    before, written, last = lead(*chunks[:4], state, *added)
    within = chunks.weights @ written
    if chunks.outputs is not None:
        within = within + chunks.outputs
    o = mx.addmm(within, chunks.queries, before)
    return o.reshape(*o.shape[:2], -1, o.shape[-1])[:, :, :length], last


def gradient(
    inputs: Sequence[mx.array],
    cotangents: Sequence[mx.array],
    outputs: Sequence[mx.array],
    *,
    lead: Lead = lead,
) -> tuple[mx.array, ...]:
    """The gradient, for which chunks are computed anew instead of being stored."""
    # otherwise mx.compile joins that with the forward pass and loses arrays of it
    anew = mx.depends(list(inputs), list(cotangents))
    return tuple(mx.vjp(partial(compute, lead=lead), anew, list(cotangents))[1])


_with_gradient = with_reference_gradient(compute, compute, gradient, is_differentiable=True)


def parallel_part(inputs: Inputs, inverse: Callable[[mx.array], mx.array]) -> Chunks:
    """All that needs no state. The last chunk is filled up with what changes nothing."""
    q, k, v, a, f, _, b = inputs
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
    solved = inverse(read_b)
    keys, reads = removed * after, solved @ (a * before)
    queries, gates = q * until, until[..., -1:, :].swapaxes(-1, -2)
    if b is None:
        return Chunks(gates, keys, reads, solved @ v, queries, seen_b)
    values, added = -(solved @ (read_k @ v)), (k * after).swapaxes(-1, -2) @ v
    return Chunks(gates, keys, reads, values, queries, seen_b, added, seen_k @ v)


def _moved(x: mx.array, steps: int, filling: float = 0.0) -> mx.array:
    """The rows `(..., C, N)` one position earlier, 1, or later, -1."""
    row = mx.full((*x.shape[:-2], 1, x.shape[-1]), filling)
    if steps > 0:
        return mx.concatenate([x[..., 1:, :], row], axis=-2)
    return mx.concatenate([row, x[..., :-1, :]], axis=-2)


def inverse_of(lower: mx.array) -> mx.array:
    """The inverse of the identity plus a matrix `(..., C, C)` that is zero on its diagonal and above."""
    size = lower.shape[-1]
    inverse = mx.ones((*lower.shape[:-2], size, 1, 1))
    while (half := inverse.shape[-1]) < size:
        blocks = lower.reshape(*lower.shape[:-2], -1, 2 * half, size // (2 * half), 2 * half)
        own = mx.moveaxis(mx.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        first, second = pairs(inverse)
        inverse = merged(inverse, -(second @ (own[..., half:, :half] @ first)))
    return inverse.squeeze(-3)
