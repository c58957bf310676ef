r"""`linear_scan` in plain operations, parallel over chunks of steps.

Let `s` be the state before a chunk. Then :math:`s_t = p_t\,s + c_t` for each step of the chunk, with the
products :math:`p_t` of its gates and the states :math:`c_t` that start from zero. All chunks compute
these side by side. The states before the chunks are a scan of their own, with one step for each chunk.
Gates may be zero, because nothing is divided and no logarithm is taken.

The gradient is the same recurrence from the last step to the first, so no slice has a gradient of its
own.
"""

from collections.abc import Sequence

import mlx.core as mx

from ..backend.gradient import with_reference_gradient
from . import reference

CHUNK_STEPS = 32
# its last bits depend on how a sequence is cut, which must not be so on a CPU
ONLY_ON = mx.gpu


def run(f: mx.array, i: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    states, last = _scan(f, i, state)
    return states, last


def _states(f: mx.array, i: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    batch, length, dims = f.shape
    if length <= CHUNK_STEPS:
        return reference.run(f, i, state)
    chunks = -(-length // CHUNK_STEPS)
    padding = [(0, 0), (0, chunks * CHUNK_STEPS - length), (0, 0)]
    shape = (batch, chunks, CHUNK_STEPS, dims)
    # steps that change nothing
    f = mx.pad(f.astype(mx.float32), padding, constant_values=1.0).reshape(shape)
    i = mx.pad(i.astype(mx.float32), padding).reshape(shape)

    products, sums = [f[:, :, 0]], [i[:, :, 0]]
    for step in range(1, CHUNK_STEPS):
        gate = f[:, :, step]
        products.append(gate * products[-1])
        sums.append(gate * sums[-1] + i[:, :, step])
    after, last = _states(products[-1], sums[-1], state)
    before = mx.concatenate([state.astype(mx.float32)[:, None], after[:, :-1]], axis=1)
    states = mx.stack(products, axis=2) * before[:, :, None] + mx.stack(sums, axis=2)
    return states.reshape(batch, chunks * CHUNK_STEPS, dims)[:, :length], last


def _gradients(
    inputs: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> tuple[mx.array, ...]:
    f, _, state = inputs
    gates = f.astype(mx.float32)
    # the gradient that reaches a step goes through the gate of the next one
    after = mx.concatenate([gates[:, 1:], mx.ones_like(gates[:, :1])], axis=1)
    backwards, _ = _states(after[:, ::-1], cotangents[0][:, ::-1], cotangents[1])
    of_i = backwards[:, ::-1]
    before = mx.concatenate([state.astype(mx.float32)[:, None], outputs[0][:, :-1]], axis=1)
    gradients = of_i * before, of_i, gates[:, 0] * of_i[:, 0]
    return tuple(g.astype(x.dtype) for g, x in zip(gradients, inputs, strict=True))


_scan = with_reference_gradient(_states, reference.run, _gradients)
