"""`gated_linear_attention` on Metal.

Over few positions, as when a text is decoded, it is one launch: a threadgroup holds 32 columns of the
state of one head in registers, each thread a segment of one column, and reads the state once and writes
it once, however many positions there are. The gradient is left to the products of matrices of
`definition`, as many launches for any length.

Longer sequences are computed in chunks, by three launches. The first finds what each chunk adds to a
state of zeros, and the product of its gates. The second leads the state from chunk to chunk. The third
runs each chunk from the state before it and reads. Chunks of a head are computed side by side, and
within one the state stays in registers. Keys, values and gates are read twice, queries once, whatever
the length; three states of a chunk are written or read in between.
"""

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend import launch, self_check
from ..backend.dispatch import not_floats
from ..backend.gradient import with_reference_gradient
from .definition import compute, reference

CHUNK = 64
"""Positions of a chunk."""

SEGMENT = 16
"""Numbers of a column of the state that a thread holds. Where keys have more than 256 dims, twice as
many: for more threads there are not enough registers."""

MAX_PARTS = 16

MAX_KEYS = 2 * MAX_PARTS * SEGMENT

_TILE = 1024
_MOST_STEPS = 8
_CARRY_THREADS = 128
_GATES = {
    "none": "",
    "head": "piece[i] *= static_cast<float>(f[position]);",
    "channel": "piece[i] *= static_cast<float>(f[at]);",
}

# A threadgroup runs 32 columns of one chunk, each SIMD group some rows of them. Keys, queries and gates
# of a few positions at a time are brought to all from threadgroup memory.
_INDICES = """
    const int length = k_shape[2];
    const int keys = k_shape[3];
    const int values = v_shape[3];
    const int lane = thread_index_in_simdgroup;
    const int part = simdgroup_index_in_threadgroup;
    const int parts = simdgroups_per_threadgroup;
    const int column = threadgroup_position_in_grid.x * 32 + lane;
    const bool is_inside = column < values;
    const size_t head = threadgroup_position_in_grid.y;
    const int chunk = threadgroup_position_in_grid.z;
    const size_t chunks = (length + CHUNK - 1) / CHUNK;
    const size_t origin = (head * chunks + chunk) * keys * values + column;
    const int first = part * PIECE;
    const int start = chunk * CHUNK;
    const int stop = min(start + CHUNK, length);
    threadgroup float tile_k[STEPS * ROWS];
    <tiles>
    float piece[PIECE];
"""

_LOOP = """
    for (int begin = start; begin < stop; begin += STEPS) {
        for (int n = part * 32 + lane; n < STEPS * ROWS; n += parts * 32) {
            const int t = begin + n / ROWS;
            const int row = n % ROWS;
            const bool is_read = t < stop && row < keys;
            const size_t at = (head * length + t) * keys + row;
            tile_k[n] = is_read ? static_cast<float>(k[at]) : 0.0f;
            <load>
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int n = 0; n < STEPS; n++) {
            const int t = begin + n;
            const bool is_read = is_inside && t < stop;
            const size_t place = (head * length + t) * values + column;
            const float value = is_read ? static_cast<float>(v[place]) : 0.0f;
            <begin>
            for (int i = 0; i < PIECE; i++) {
                const int at = n * ROWS + first + i;
                <gate>
                piece[i] += tile_k[at] * value;
                <read>
            }
            <end>
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        <write>
    }
"""

_SUM_END = """
    for (int i = 0; i < PIECE; i++) {
        if (is_inside && first + i < keys) {
            sums[origin + static_cast<size_t>(first + i) * values] = piece[i];
        }
    }
"""

# there are at least as many threads as rows: each has the product of the gates of one
_PRODUCT = """
    if (threadgroup_position_in_grid.x == 0 && mine < keys) {
        gates[(head * chunks + chunk) * keys + mine] = product;
    }
"""

_CARRY = """
    const int keys = state_shape[2];
    const int values = state_shape[3];
    const size_t chunks = sums_shape[2];
    const size_t size = static_cast<size_t>(keys) * values;
    const size_t place = thread_position_in_grid.x;
    const size_t head = thread_position_in_grid.y;
    if (place >= size) return;
    float held = state[head * size + place];
    for (size_t chunk = 0; chunk < chunks; chunk++) {
        const size_t at = (head * chunks + chunk) * size + place;
        before[at] = held;
        held = <gate>held + sums[at];
    }
    last[head * size + place] = held;
"""

_READ_START = """
    for (int i = 0; i < PIECE; i++) {
        const bool is_held = is_inside && first + i < keys;
        piece[i] = is_held ? before[origin + static_cast<size_t>(first + i) * values] : 0.0f;
    }
"""

# each SIMD group adds up some of the positions
_READ_WRITE = """
        for (int n = part; n < STEPS && begin + n < stop; n += parts) {
            float sum = 0;
            for (int p = 0; p < parts; p++) sum += partial[(p * STEPS + n) * 32 + lane];
            if (is_inside) o[(head * length + begin + n) * values + column] = sum;
        }
"""

_LOAD_GATE = {
    "none": "",
    "head": "tile_f[n] = is_read ? static_cast<float>(f[head * length + t]) : 1.0f;",
    "channel": "tile_f[n] = is_read ? static_cast<float>(f[at]) : 1.0f;",
}


def _filled(text: str, **words: str) -> str:
    for name, value in words.items():
        text = text.replace(f"<{name}>", value)
    return text


def _sum_source(gate: str) -> str:
    is_gated = gate != "none"
    loop = _filled(
        _LOOP,
        load=_LOAD_GATE[gate],
        begin="if (mine < ROWS) product *= tile_f[n * ROWS + mine];" if is_gated else "",
        gate="piece[i] *= tile_f[at];" if is_gated else "",
        read="",
        end="",
        write="",
    )
    start = "for (int i = 0; i < PIECE; i++) piece[i] = 0;"
    tiles = ""
    if is_gated:
        tiles = "threadgroup float tile_f[STEPS * ROWS];"
        start += "\n    const int mine = part * 32 + lane;\n    float product = 1;"
    end = _SUM_END + (_PRODUCT if is_gated else "")
    return _filled(_INDICES, tiles=tiles) + start + loop + end


def _read_source(gate: str) -> str:
    load = "tile_q[n] = is_read ? static_cast<float>(q[at]) : 0.0f;\n" + _LOAD_GATE[gate]
    loop = _filled(
        _LOOP,
        load=load,
        begin="float sum = 0;",
        gate="" if gate == "none" else "piece[i] *= tile_f[at];",
        read="sum += tile_q[at] * piece[i];",
        end="partial[(part * STEPS + n) * 32 + lane] = sum;",
        write=_READ_WRITE,
    )
    tiles = "threadgroup float tile_q[STEPS * ROWS];\n    "
    tiles += "" if gate == "none" else "threadgroup float tile_f[STEPS * ROWS];\n    "
    # as many partial sums as there are rows in segments
    tiles += "threadgroup float partial[STEPS * ROWS / PIECE * 32];"
    return _filled(_INDICES, tiles=tiles) + _READ_START + loop


def _kernel(name: str, inputs: Sequence[str], outputs: Sequence[str], source: str) -> Any:
    return mx.fast.metal_kernel(
        name=f"gated_linear_attention_{name}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
    )


# (B, H, L, K), (B, H, L, V), (B, H, L, K or 1) to (B, H, chunks, K, V), (B, H, chunks, K)
_sum_kernels = {
    gate: _kernel(
        f"sums_{gate}",
        ["k", "v", *([] if gate == "none" else ["f"])],
        ["sums", *([] if gate == "none" else ["gates"])],
        _sum_source(gate),
    )
    for gate in _GATES
}
# to (B, H, chunks, K, V), (B, H, K, V)
_carry_kernels = {
    is_gated: _kernel(
        f"carry_{'gated' if is_gated else 'plain'}",
        ["state", "sums", *(["gates"] if is_gated else [])],
        ["before", "last"],
        _CARRY.replace(
            "<gate>",
            "gates[(head * chunks + chunk) * keys + place / values] * " if is_gated else "",
        ),
    )
    for is_gated in (False, True)
}
# to (B, H, L, V)
_read_kernels = {
    gate: _kernel(
        f"read_{gate}",
        ["q", "k", "v", "before", *([] if gate == "none" else ["f"])],
        ["o"],
        _read_source(gate),
    )
    for gate in _GATES
}


def _in_chunks(
    q: mx.array, k: mx.array, v: mx.array, state: mx.array, f: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The outputs `(B, H, L, V)` in the dtype of `v`, and the last state. Keys have at most 512 dims."""
    batch, heads, length, keys = q.shape
    values, chunks = v.shape[3], -(-length // CHUNK)
    gate = _gate(q, f)
    given = [] if f is None else [f]
    segment = _segment(keys)
    rows = -(-keys // segment) * segment
    threads = launch.SIMD_GROUP * (rows // segment)
    variant: dict[str, Any] = {
        "template": [
            ("CHUNK", CHUNK),
            ("PIECE", segment),
            ("ROWS", rows),
            ("STEPS", max(1, min(_MOST_STEPS, _TILE // rows))),
        ],
        "grid": (-(-values // launch.SIMD_GROUP) * threads, batch * heads, chunks),
        "threadgroup": (threads, 1, 1),
    }
    states = (batch, heads, chunks, keys, values)
    shapes = [states, *([] if f is None else [(batch, heads, chunks, keys)])]
    sums, *gates = launch.launch(
        _sum_kernels[gate],
        inputs=[k, v, *given],
        output_shapes=shapes,
        output_dtypes=[mx.float32] * len(shapes),
        **variant,
    )
    before, last = launch.launch(
        _carry_kernels[f is not None],
        inputs=[state.astype(mx.float32), sums, *gates],
        grid=(-(-keys * values // _CARRY_THREADS) * _CARRY_THREADS, batch * heads, 1),
        threadgroup=(_CARRY_THREADS, 1, 1),
        output_shapes=[states, state.shape],
        output_dtypes=[mx.float32] * 2,
    )
    (o,) = launch.launch(
        _read_kernels[gate],
        inputs=[q, k, v, before, *given],
        output_shapes=[v.shape],
        output_dtypes=[mx.float32],
        **variant,
    )
    return o.astype(v.dtype), last


MAX_LENGTH = 32
"""The most positions for one launch: beyond, there is more to do in parallel."""

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
    threadgroup float sums[16 * 32];

    float piece[PIECE];
    for (int i = 0; i < PIECE; i++) {
        const bool is_held = is_inside && (FULL || first + i < keys);
        piece[i] = is_held ? state[origin + static_cast<size_t>(first + i) * values] : 0.0f;
    }
    for (int t = 0; t < length; t++) {
        const size_t position = head * length + t;
        const float value = is_inside ? static_cast<float>(v[position * values + column]) : 0.0f;
        float sum = 0;
        for (int i = 0; i < PIECE; i++) {
            if (FULL || first + i < keys) {
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
        if (is_inside && (FULL || first + i < keys)) {
            last[origin + static_cast<size_t>(first + i) * values] = piece[i];
        }
    }
"""

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
    if reason := not_floats(q, k, v, f, state):
        return reason
    if q.shape[3] > MAX_KEYS:
        return f"it takes up to {MAX_KEYS} dims of a key"
    dtypes: dict[str, Any] = {"q": q.dtype, "k": k.dtype, "v": v.dtype}
    dtypes["f"] = None if f is None else f.dtype
    is_long = q.shape[2] > MAX_LENGTH
    length, segment = 2 * CHUNK + 2 if is_long else 3, _segment(q.shape[3])
    is_full = q.shape[3] % segment == 0
    return self_check.kernel_fault(
        f"gated_linear_attention_{'chunks_' if is_long else ''}{_gate(q, f)}",
        _computed,
        lambda q, k, v, state, *f: reference(q, k, v, f[0] if f else None, state),
        lambda: _check_inputs(_gate(q, f), length, segment, is_full, **dtypes),
        segment=segment,
        is_full=is_full,
        **dtypes,
    )


def metal(
    q: mx.array, k: mx.array, v: mx.array, f: mx.array | None, state: mx.array
) -> tuple[mx.array, mx.array]:
    gates = () if f is None else (f,)
    o, last = _with_gradient(q, k, v, state, *gates)
    return o, last


def _segment(keys: int) -> int:
    return SEGMENT if keys <= MAX_PARTS * SEGMENT else 2 * SEGMENT


def _gate(q: mx.array, f: mx.array | None) -> str:
    if f is None:
        return "none"
    return "head" if f.shape[3] < q.shape[3] else "channel"


def _check_inputs(
    gate: str,
    length: int,
    segment: int,
    is_full: bool,
    q: mx.Dtype,
    k: mx.Dtype,
    v: mx.Dtype,
    f: mx.Dtype | None,
) -> tuple[mx.array, ...]:
    # as few segments of a column as make them so long, at least two, and more columns than lanes
    keys = (1 if segment == SEGMENT else MAX_PARTS // 2) * segment + (segment if is_full else 1)
    heads, values = (2, 1, length), launch.SIMD_GROUP + 1

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
    step = _in_chunks if q.shape[2] > MAX_LENGTH else _states
    return step(q, k, v, state, f)


def _states(
    q: mx.array, k: mx.array, v: mx.array, state: mx.array, f: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    batch, heads, length, keys = q.shape
    values = v.shape[3]
    segment = _segment(keys)
    threads = launch.SIMD_GROUP * -(-keys // segment)
    o, last = launch.launch(
        _kernels[_gate(q, f)],
        inputs=[q, k, v, state.astype(mx.float32), *([] if f is None else [f])],
        template=[("PIECE", segment), ("FULL", keys % segment == 0)],
        grid=(-(-values // launch.SIMD_GROUP) * threads, batch * heads, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(batch, heads, length, values), state.shape],
        output_dtypes=[mx.float32, mx.float32],
    )
    return o.astype(v.dtype), last


_with_gradient = with_reference_gradient(_computed, compute)
