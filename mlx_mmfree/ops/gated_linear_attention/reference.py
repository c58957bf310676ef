"""Definition of `gated_linear_attention`: one position after the other."""

import mlx.core as mx


def run(
    q: mx.array, k: mx.array, v: mx.array, f: mx.array | None, state: mx.array
) -> tuple[mx.array, mx.array]:
    last, outputs = state.astype(mx.float32), []
    arrays = [x.astype(mx.float32) for x in (q, k, v)]
    gates = [None] * q.shape[2] if f is None else _positions(f.astype(mx.float32))
    for query, key, value, gate in zip(*map(_positions, arrays), gates, strict=True):
        if gate is not None:
            last = gate.swapaxes(-1, -2) * last
        last = last + key.swapaxes(-1, -2) * value
        outputs.append(query @ last)
    return mx.concatenate(outputs, axis=2).astype(v.dtype), last


def _positions(x: mx.array) -> list[mx.array]:
    """Each position of `(B, H, L, N)` by itself, `(B, H, 1, N)`."""
    return list(mx.split(x, x.shape[2], axis=2))
