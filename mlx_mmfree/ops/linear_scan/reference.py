"""Definition of `linear_scan`: one step after the other."""

import mlx.core as mx

from ..splitting import positions


def run(f: mx.array, i: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    length = f.shape[1]
    if length == 0:
        return mx.zeros(f.shape, mx.float32), state
    # Time first, so that one step is one contiguous (B, D) block.
    gates = positions(f.astype(mx.float32).swapaxes(0, 1), axis=0)
    inputs = positions(i.astype(mx.float32).swapaxes(0, 1), axis=0)
    states = []
    last = state.astype(mx.float32)[None]
    for gate, value in zip(gates, inputs, strict=True):
        last = gate * last + value
        states.append(last)
    return mx.concatenate(states, axis=0).swapaxes(0, 1), last[0]
