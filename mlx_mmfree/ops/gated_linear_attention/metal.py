"""`gated_linear_attention` on Metal.

Over few positions, as when a text is decoded, it is one launch: a threadgroup holds 32 columns of the
state of one head in registers, each thread a piece of one column, and reads the state once and writes it
once, however many positions there are. Longer sequences are computed in chunks by `metal_chunks`. The
gradient is left to the products of matrices of `definition`, as many launches for any length.
"""

import math
from typing import Any

import mlx.core as mx

from ..backend import launch, self_check
from ..backend.gradient import with_reference_gradient
from . import metal_chunks
from .definition import compute, reference
from .metal_chunks import PIECE

MAX_LENGTH = 32
"""The most positions for one launch: beyond, there is more to do in parallel."""

MAX_KEYS = 32 * PIECE

_SOURCE = """
    const int length = q_shape[2];
    const int keys = q_shape[3];
    const int values = v_shape[3];
    const int lane = thread_index_in_simdgroup;
    const int part = simdgroup_index_in_threadgroup;
    const int parts = simdgroups_per_threadgroup;
    const int column = threadgroup_position_in_grid.x * 32 + lane;
    const bool is_inside = column < values;
    const size_t head = threadgroup_position_in_grid.y;
    const size_t origin = head * keys * values + column;
    const int first = part * PIECE;
    threadgroup float sums[32 * 32];

    float piece[PIECE];
    for (int i = 0; i < PIECE; i++) {
        const bool is_held = is_inside && first + i < keys;
        piece[i] = is_held ? state[origin + static_cast<size_t>(first + i) * values] : 0.0f;
    }
    for (int t = 0; t < length; t++) {
        const size_t position = head * length + t;
        const float value = is_inside ? static_cast<float>(v[position * values + column]) : 0.0f;
        float sum = 0;
        for (int i = 0; i < PIECE; i++) {
            if (first + i < keys) {
                const size_t at = position * keys + first + i;
                <gate>
                piece[i] += static_cast<float>(k[at]) * value;
                sum += static_cast<float>(q[at]) * piece[i];
            }
        }
        sums[part * 32 + lane] = sum;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (part == 0 && is_inside) {
            for (int p = 1; p < parts; p++) sum += sums[p * 32 + lane];
            o[position * values + column] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (int i = 0; i < PIECE; i++) {
        if (is_inside && first + i < keys) {
            last[origin + static_cast<size_t>(first + i) * values] = piece[i];
        }
    }
"""

_GATES = {
    "none": "",
    "head": "piece[i] *= static_cast<float>(f[position]);",
    "channel": "piece[i] *= static_cast<float>(f[at]);",
}

_kernels = {
    name: mx.fast.metal_kernel(
        name=f"gated_linear_attention_{name}",
        # (B, H, L, K), (B, H, L, K), (B, H, L, V), (B, H, K, V), (B, H, L, K or 1)
        input_names=["q", "k", "v", "state", *(["f"] if gate else [])],
        output_names=["o", "last"],  # (B, H, L, V), (B, H, K, V)
        source=_SOURCE.replace("<gate>", gate),
    )
    for name, gate in _GATES.items()
}


def unsupported(
    q: mx.array, k: mx.array, v: mx.array, f: mx.array | None, state: mx.array
) -> str | None:
    if reason := launch.not_floats(q, k, v, f, state):
        return reason
    if q.shape[3] > MAX_KEYS:
        return f"it takes up to {MAX_KEYS} dims of a key"
    dtypes: dict[str, Any] = {"q": q.dtype, "k": k.dtype, "v": v.dtype}
    dtypes["f"] = None if f is None else f.dtype
    is_long = q.shape[2] > MAX_LENGTH
    length = 2 * metal_chunks.CHUNK + 2 if is_long else 3
    return self_check.kernel_fault(
        f"gated_linear_attention_{'chunks_' if is_long else ''}{_gate(q, f)}",
        _computed,
        lambda q, k, v, state, *f: reference(q, k, v, f[0] if f else None, state),
        lambda: _check_inputs(_gate(q, f), length, **dtypes),
        **dtypes,
    )


def metal(
    q: mx.array, k: mx.array, v: mx.array, f: mx.array | None, state: mx.array
) -> tuple[mx.array, mx.array]:
    gates = () if f is None else (f,)
    o, last = _with_gradient(q, k, v, state, *gates)
    return o, last


def _gate(q: mx.array, f: mx.array | None) -> str:
    if f is None:
        return "none"
    return "head" if f.shape[3] < q.shape[3] else "channel"


def _check_inputs(
    gate: str, length: int, q: mx.Dtype, k: mx.Dtype, v: mx.Dtype, f: mx.Dtype | None
) -> tuple[mx.array, ...]:
    # two pieces of a column, and more columns than lanes
    heads, keys, values = (2, 1, length), PIECE + 1, launch.SIMD_GROUP + 1

    def pattern(factor: int, *shape: int) -> mx.array:
        numbers = mx.arange(math.prod(shape)).reshape(shape)
        return (numbers * factor % 101) / 101.0

    given = (
        (pattern(37, *heads, keys) - 0.5).astype(q),
        (pattern(53, *heads, keys) - 0.5).astype(k),
        (pattern(29, *heads, values) - 0.5).astype(v),
        pattern(71, *heads[:2], keys, values) - 0.5,
    )
    if f is None:
        return given
    return *given, pattern(83, *heads, 1 if gate == "head" else keys).astype(f)


def _computed(
    q: mx.array, k: mx.array, v: mx.array, state: mx.array, f: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    step = metal_chunks.run if q.shape[2] > MAX_LENGTH else _states
    return step(q, k, v, state, f)


def _states(
    q: mx.array, k: mx.array, v: mx.array, state: mx.array, f: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    batch, heads, length, keys = q.shape
    values = v.shape[3]
    threads = launch.SIMD_GROUP * -(-keys // PIECE)
    o, last = launch.launch(
        _kernels[_gate(q, f)],
        inputs=[q, k, v, state.astype(mx.float32), *([] if f is None else [f])],
        template=[("PIECE", PIECE)],
        grid=(-(-values // launch.SIMD_GROUP) * threads, batch * heads, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(batch, heads, length, values), state.shape],
        output_dtypes=[mx.float32, mx.float32],
    )
    return o.astype(v.dtype), last


_with_gradient = with_reference_gradient(_computed, compute)
