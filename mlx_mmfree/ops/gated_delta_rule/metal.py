"""`gated_delta_rule` on Metal.

Over few positions, as when a text is decoded, it is one launch: a threadgroup holds some columns of the
state of one head in registers, each thread a piece of some of them, and reads the state once and writes
it once, however many positions there are. Of longer sequences, all that needs no state is computed for
all chunks at once, as in `chunked`. One launch leads the state from chunk to chunk, and one its gradient
back. The rest of the gradient is left to the products of matrices of `chunked`.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ..backend import launch, self_check
from ..backend.gradient import with_reference_gradient
from ..gated_linear_attention.definition import CHUNK_LENGTH
from .definition import compute, gradient, lead, lead_gradient, reference

PIECE = 16
"""Rows of the state of which a thread holds its columns."""

MAX_LENGTH = 32
"""The most positions for one launch: beyond, there is more to do in parallel."""

MAX_KEYS = 32 * PIECE

COLUMNS = 4
"""Columns of a thread in decoding, where there are enough: they share what is read for a row."""

COLUMNS_OF_REMOVAL = 2
"""As many where something else than the key is removed, for which a thread keeps more numbers."""

STEPS = 8
"""Positions of a chunk whose reads are added up together."""

_PLACE = """
    const int values = state_shape[3];
    const int keys = state_shape[2];
    const int lane = thread_index_in_simdgroup;
    const int part = simdgroup_index_in_threadgroup;
    const int column = (threadgroup_position_in_grid.x * 32 + lane) * COLUMNS;
    const bool is_inside = column < values;
    const size_t head = threadgroup_position_in_grid.y;
    const size_t origin = head * keys * values + column;
    const int first = part * PIECE;
    float piece[PIECE][COLUMNS];
    for (int i = 0; i < PIECE; i++) {
        const bool is_held = is_inside && (FULL || first + i < keys);
        const size_t at = origin + static_cast<size_t>(first + i) * values;
        for (int c = 0; c < COLUMNS; c++) piece[i][c] = is_held ? state[at + c] : 0.0f;
    }
"""

_LAST = """
    for (int i = 0; i < PIECE; i++) {
        if (is_inside && (FULL || first + i < keys)) {
            const size_t at = origin + static_cast<size_t>(first + i) * values;
            for (int c = 0; c < COLUMNS; c++) last[at + c] = piece[i][c];
        }
    }
"""

_STEP = """
    const int length = q_shape[2];
    threadgroup float sums[PARTS * 32 * COLUMNS];
    for (int t = 0; t < length; t++) {
        const size_t position = head * length + t;
        const size_t row = position * keys + first;
        <head_gate>
        float taken[COLUMNS] = {};
        for (int i = 0; i < PIECE; i++) {
            if (FULL || first + i < keys) {
                const float read = a[row + i];
                for (int c = 0; c < COLUMNS; c++) taken[c] += read * piece[i][c];
            }
        }
        for (int c = 0; c < COLUMNS; c++) sums[(part * COLUMNS + c) * 32 + lane] = taken[c];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float written[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) {
            float sum = sums[c * 32 + lane];
            for (int p = 1; p < PARTS; p++) sum += sums[(p * COLUMNS + c) * 32 + lane];
            taken[c] = sum;
            written[c] = is_inside ? v[position * values + column + c] : 0.0f;
            <written>
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float read[COLUMNS] = {};
        for (int i = 0; i < PIECE; i++) {
            if (FULL || first + i < keys) {
                <gate>
                const float own = k[row + i];
                const float query = q[row + i];
                <removed>
                for (int c = 0; c < COLUMNS; c++) {
                    float held = gate * piece[i][c] + own * written[c];
                    <taken>
                    piece[i][c] = held;
                    read[c] += query * held;
                }
            }
        }
        for (int c = 0; c < COLUMNS; c++) sums[(part * COLUMNS + c) * 32 + lane] = read[c];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int c = part; c < COLUMNS; c += PARTS) {
            float sum = sums[c * 32 + lane];
            for (int p = 1; p < PARTS; p++) sum += sums[(p * COLUMNS + c) * 32 + lane];
            if (is_inside) o[position * values + column + c] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
"""

_CARRY = """
    const int size = reads_shape[3];
    const size_t chunks = reads_shape[2];
    threadgroup float sums[PARTS * STEPS * 32];
    for (size_t chunk = 0; chunk < chunks; chunk++) {
        const size_t place = head * chunks + chunk;
        const size_t begin = place * keys * values + column;
        float next[PIECE];
        for (int i = 0; i < PIECE; i++) {
            const bool is_held = is_inside && (FULL || first + i < keys);
            const size_t at = begin + static_cast<size_t>(first + i) * values;
            next[i] = is_held ? <gate> * piece[i][0] + added[at] : 0.0f;
            if (is_held) before[at] = piece[i][0];
        }
        for (int start = 0; start < size; start += STEPS) {
            for (int n = 0; n < STEPS; n++) {
                float sum = 0;
                const size_t row = (place * size + start + n) * keys + first;
                for (int i = 0; i < PIECE; i++) {
                    const bool is_read = start + n < size && (FULL || first + i < keys);
                    sum += is_read ? reads[row + i] * piece[i][0] : 0.0f;
                }
                sums[(part * STEPS + n) * 32 + lane] = sum;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (int n = 0; n < STEPS && start + n < size; n++) {
                float taken = sums[n * 32 + lane];
                for (int p = 1; p < PARTS; p++) taken += sums[(p * STEPS + n) * 32 + lane];
                const size_t row = (place * size + start + n) * keys + first;
                for (int i = 0; i < PIECE; i++) {
                    if (FULL || first + i < keys) next[i] -= own[row + i] * taken;
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        for (int i = 0; i < PIECE; i++) piece[i][0] = next[i];
    }
"""


def _step_source(gate: str, has_removal: bool) -> str:
    of_head = "const float gate = f[position];"
    words = {
        "head_gate": of_head if gate == "head" else "",
        "gate": "" if gate == "head" else "const float gate = f[row + i];",
        "written": "" if has_removal else "written[c] -= sum;",
        "removed": "const float removed = b[row + i];" if has_removal else "",
        "taken": "held -= removed * taken[c];" if has_removal else "",
    }
    text = _STEP
    for name, value in words.items():
        text = text.replace(f"<{name}>", value)
    return _PLACE + text + _LAST


_step_kernels = {
    (gate, has_removal): mx.fast.metal_kernel(
        name=f"gated_delta_rule_{gate}{'_removal' if has_removal else ''}",
        # (B, H, L, K) each, but v (B, H, L, V), f (B, H, L, K or 1) and state (B, H, K, V)
        input_names=["q", "k", "v", "a", "f", "state", *(["b"] if has_removal else [])],
        output_names=["o", "last"],  # (B, H, L, V), (B, H, K, V)
        source=_step_source(gate, has_removal),
    )
    for gate in ("head", "channel")
    for has_removal in (False, True)
}

_carry_kernels = {
    gate: mx.fast.metal_kernel(
        name=f"gated_delta_rule_carry_{gate}",
        # (B, H, chunks, K or 1, 1), (B, H, chunks, C, K) twice, (B, H, chunks, K, V), (B, H, K, V)
        input_names=["gates", "own", "reads", "added", "state"],
        output_names=["before", "last"],  # (B, H, chunks, K, V), (B, H, K, V)
        source=_PLACE
        + _CARRY.replace("<gate>", f"gates[place{'' if gate == 'head' else ' * keys + first + i'}]")
        + _LAST,
    )
    for gate in ("head", "channel")
}


def unsupported(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    f: mx.array,
    state: mx.array,
    b: mx.array | None = None,
) -> str | None:
    keys, values = state.shape[2:]
    if keys > MAX_KEYS:
        return f"it takes up to {MAX_KEYS} dims of a key"
    is_long = q.shape[2] > MAX_LENGTH
    variant: dict[str, Any] = {
        "gate": _gate(f, keys),
        "columns": 1 if is_long else _columns(keys, values, b is not None),
        "is_full": keys % PIECE == 0,
        "has_removal": b is not None,
    }
    return self_check.kernel_fault(
        f"gated_delta_rule{'_chunks' if is_long else ''}",
        _computed,
        reference,
        lambda: _check_inputs(2 * CHUNK_LENGTH + 2 if is_long else 3, **variant),
        **variant,
    )


def metal(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    f: mx.array,
    state: mx.array,
    b: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    o, last = _with_gradient(q, k, v, a, f, state, *([] if b is None else [b]))
    return o, last


def _gate(f: mx.array, keys: int) -> str:
    return "channel" if f.shape[3] == keys else "head"


def _columns(keys: int, values: int, has_removal: bool) -> int:
    """Those of a thread; the registers of threads with several do not suffice for larger groups."""
    columns = COLUMNS_OF_REMOVAL if has_removal else COLUMNS
    is_filled = values % columns == 0 and values >= launch.SIMD_GROUP * columns
    return columns if is_filled and keys <= 8 * PIECE else 1


def _check_inputs(
    length: int, gate: str, columns: int, is_full: bool, has_removal: bool
) -> tuple[mx.array, ...]:
    # two pieces of a column, and more columns than a threadgroup holds
    keys = 2 * PIECE if is_full else PIECE + 1
    heads, values = (2, 1, length), columns * (launch.SIMD_GROUP + 1)

    def pattern(factor: int, *shape: int) -> mx.array:
        numbers = mx.arange(math.prod(shape)).reshape(shape)
        return (numbers * factor % 101) / 101.0 - 0.5

    small = keys**-0.5
    given = (
        pattern(37, *heads, keys),
        small * pattern(53, *heads, keys),
        pattern(29, *heads, values),
        small * pattern(41, *heads, keys),
        0.5 + pattern(83, *heads, 1 if gate == "head" else keys),
        pattern(71, *heads[:2], keys, values),
    )
    return (*given, small * pattern(67, *heads, keys)) if has_removal else given


def _launch(
    kernel: Any, inputs: list[mx.array], outputs: list[tuple[int, ...]], columns: int
) -> Any:
    state = outputs[1]
    parts = -(-state[2] // PIECE)
    threads = launch.SIMD_GROUP * parts
    return launch.launch(
        kernel,
        inputs=inputs,
        template=[
            ("PIECE", PIECE),
            ("PARTS", parts),
            ("COLUMNS", columns),
            ("STEPS", STEPS),
            ("FULL", state[2] % PIECE == 0),
        ],
        grid=(-(-state[3] // (launch.SIMD_GROUP * columns)) * threads, state[0] * state[1], 1),
        threadgroup=(threads, 1, 1),
        output_shapes=outputs,
        output_dtypes=[mx.float32, mx.float32],
    )


def _computed(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    f: mx.array,
    state: mx.array,
    b: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    if q.shape[2] > MAX_LENGTH:
        return compute(q, k, v, a, f, state, b, lead=_lead)
    kernel = _step_kernels[_gate(f, q.shape[3]), b is not None]
    inputs = [q, k, v, a, f, state, *([] if b is None else [b])]
    o, last = _launch(
        kernel, inputs, [v.shape, state.shape], _columns(q.shape[3], v.shape[3], b is not None)
    )
    return o, last


def _led(
    gates: mx.array, keys: mx.array, reads: mx.array, added: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The states in one launch."""
    kernel = _carry_kernels["channel" if gates.shape[3] == added.shape[3] else "head"]
    inputs = [gates, keys, reads, added, state]
    before, last = _launch(kernel, inputs, [added.shape, state.shape], 1)
    return before, last


def _lead(*arrays: mx.array) -> tuple[mx.array, mx.array]:
    """As `definition.lead`, forwards and backwards in one launch, however many chunks there are."""
    before, last = _with_gradient_of_states(*arrays)
    return before, last


def _gradient_of_states(
    inputs: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> tuple[mx.array, ...]:
    return lead_gradient(inputs, cotangents, outputs, _lead)


_with_gradient_of_states = with_reference_gradient(
    _led, lead, _gradient_of_states, is_differentiable=True
)
_with_gradient = with_reference_gradient(
    _computed, compute, partial(gradient, lead=_lead), is_differentiable=True
)
