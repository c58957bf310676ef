"""`gated_delta_rule` on Metal.

Over few positions, as when a text is decoded, it is one launch: a threadgroup holds some columns of the
state of one head in registers, each thread a segment of some of them, and reads the state once and
writes it once, however many positions there are. Longer sequences are computed in chunks, see
`metal_chunks`. The gradient is left to the products of matrices of `chunked`, but for the states between
the chunks.
"""

import math
from functools import partial
from typing import Any

import mlx.core as mx

from ..backend import launch, self_check
from ..backend.gradient import with_reference_gradient
from ..gated_linear_attention.definition import CHUNK_LENGTH
from .definition import Inputs, compute, gradient, reference
from .metal_chunks import columns_and_segment, in_launches, lead_in_one_launch

SEGMENT = 16
"""Rows of the state of which a thread holds its columns. Where keys have more than 256 dims, twice as
many: for more threads there are not enough registers."""

MAX_LENGTH = 32
"""The most positions for one launch: beyond, there is more to do in parallel."""

MAX_PARTS = 16

MAX_KEYS = 2 * MAX_PARTS * SEGMENT

COLUMNS = 4
"""Columns of a thread in decoding, where there are enough: they share what is read for a row."""

COLUMNS_OF_REMOVAL = 2
"""The same where something else than the key is removed, for which a thread keeps more numbers."""

_INDICES = """
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
    return _INDICES + text + _LAST


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


def unsupported(*arrays: mx.array) -> str | None:
    q, _, _, _, f, state, b = Inputs(*arrays)
    keys, values = state.shape[2:]
    if keys > MAX_KEYS:
        return f"it takes up to {MAX_KEYS} dims of a key"
    has_removal, is_long = b is not None, q.shape[2] > MAX_LENGTH
    columns, segment = _columns(keys, values, has_removal), _segment(keys)
    if is_long:
        columns, segment = columns_and_segment(keys, values, has_removal)
    variant: dict[str, Any] = {
        "gate": _gate(f, keys),
        "columns": columns,
        "segment": segment,
        "parts": -(-keys // segment),
        "is_full": keys % segment == 0,
        "has_removal": has_removal,
    }
    return self_check.kernel_fault(
        f"gated_delta_rule{'_chunks' if is_long else ''}",
        _computed,
        reference,
        lambda: _check_inputs(2 * CHUNK_LENGTH + 2 if is_long else 3, **variant),
        **variant,
    )


def metal(*arrays: mx.array) -> tuple[mx.array, mx.array]:
    o, last = _with_gradient(*arrays)
    return o, last


def _gate(f: mx.array, keys: int) -> str:
    return "channel" if f.shape[3] == keys else "head"


def _segment(keys: int) -> int:
    return SEGMENT if keys <= MAX_PARTS * SEGMENT else 2 * SEGMENT


def _columns(keys: int, values: int, has_removal: bool) -> int:
    """The columns of a thread; registers of threads with several do not suffice for larger groups."""
    columns = COLUMNS_OF_REMOVAL if has_removal else COLUMNS
    is_filled = values % columns == 0 and values >= launch.SIMD_GROUP * columns
    return columns if is_filled and keys <= 8 * SEGMENT else 1


def _check_inputs(
    length: int,
    gate: str,
    columns: int,
    segment: int,
    parts: int,
    is_full: bool,
    has_removal: bool,
) -> tuple[mx.array, ...]:
    keys = parts * segment - (0 if is_full else segment // 2)
    # more columns than a threadgroup holds, and no array of fewer than 8 numbers, which would have
    # another text
    heads, values = (2, 4, length), columns * (launch.SIMD_GROUP + 1)

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
    segment = _segment(state[2])
    parts = -(-state[2] // segment)
    threads = launch.SIMD_GROUP * parts
    return launch.launch(
        kernel,
        inputs=inputs,
        template=[
            ("PIECE", segment),
            ("PARTS", parts),
            ("COLUMNS", columns),
            ("FULL", state[2] % segment == 0),
        ],
        grid=(-(-state[3] // (launch.SIMD_GROUP * columns)) * threads, state[0] * state[1], 1),
        threadgroup=(threads, 1, 1),
        output_shapes=outputs,
        output_dtypes=[mx.float32, mx.float32],
    )


def _computed(*arrays: mx.array) -> tuple[mx.array, mx.array]:
    inputs = Inputs(*arrays)
    if inputs.q.shape[2] > MAX_LENGTH:
        return in_launches(inputs)
    keys, values = inputs.state.shape[2:]
    kernel = _step_kernels[_gate(inputs.f, keys), inputs.b is not None]
    columns = _columns(keys, values, inputs.b is not None)
    o, last = _launch(kernel, list(arrays), [inputs.v.shape, inputs.state.shape], columns)
    return o, last


_with_gradient = with_reference_gradient(
    _computed, compute, partial(gradient, lead=lead_in_one_launch), is_differentiable=True
)
