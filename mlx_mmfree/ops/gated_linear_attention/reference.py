"""Definition of `gated_linear_attention`: one position after the other."""

import mlx.core as mx

from ..splitting import positions


def run(
    q: mx.array, k: mx.array, v: mx.array, f: mx.array | None, state: mx.array
) -> tuple[mx.array, mx.array]:
    last, outputs = state.astype(mx.float32), []
    steps = [positions(x.astype(mx.float32), axis=2) for x in (q, k, v)]
    gates = [None] * q.shape[2] if f is None else positions(f.astype(mx.float32), axis=2)
    for query, key, value, gate in zip(*steps, gates, strict=True):
        if gate is not None:
            last = gate.swapaxes(-1, -2) * last
        last = last + key.swapaxes(-1, -2) * value
        outputs.append(query @ last)
    return mx.concatenate(outputs, axis=2).astype(v.dtype), last
