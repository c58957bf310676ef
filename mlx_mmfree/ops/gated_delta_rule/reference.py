"""Definition of `gated_delta_rule`: one position after the other."""

import mlx.core as mx

from ..splitting import positions


def run(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    f: mx.array,
    state: mx.array,
    b: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """What is read under `a` is taken away under `b`, or under `k`."""
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
