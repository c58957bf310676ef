"""The kernels of `gated_delta_rule` over chunks on Metal.

MLX multiplies matrices for all chunks at once. One launch between its products weights the positions of
each chunk by their gates, and inverts the matrix of what they read of each other. A second one leads
the state from chunk to chunk, or its gradient back: a threadgroup holds some columns of the state of one
head in registers, each thread a segment of some of them.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend import launch
from ..backend.gradient import with_reference_gradient
from ..gated_linear_attention.definition import CHUNK_LENGTH, in_chunks
from .definition import Chunks, Inputs, lead, lead_gradient, led, parallel_part

_SEGMENT = 16
_PARTS = 8
"""The most segments of a column, of as many rows of the state or a multiple."""

_COLUMNS = 2
"""Columns of a thread, where there are enough and nothing is added: they share what is read."""

_THREADS = 256

# The inverses of two neighbouring blocks on the diagonal make the inverse of both. What lies below them
# is a product: the second's inverse, minus what it reads of the first, and the first's inverse. The
# smallest blocks, of 4 rows, are solved column by column. Rows after the last are rows of the identity.
_INVERSE = """
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int corner = mine / 4 * 4 * (SIZE + 1);
    float solved[4];
    if (mine < rows) {
        for (int i = 0; i < 4; i++) {
            solved[i] = i == mine % 4 ? 1.0f : 0.0f;
            for (int m = 0; m < i; m++) solved[i] -= matrix[corner + i * SIZE + m] * solved[m];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (mine < rows) {
        for (int i = 0; i < 4; i++) matrix[corner + i * SIZE + mine % 4] = solved[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup float between[SIZE * SIZE / 4];
    for (int bits = 2; (1 << bits) < rows; bits++) {
        const int span = 1 << bits;
        for (int step = 0; step < 2; step++) {
            for (int n = mine; n < SIZE / 2 << bits; n += THREADS) {
                const int begin = n >> (2 * bits) << (bits + 1);
                const int row = n >> bits & (span - 1);
                const int column = n & (span - 1);
                const int line = (begin + span + row) * SIZE + begin;
                if (begin + span + row < rows) {
                    float sum = 0;
                    if (step == 0) {
                        const int first = begin * (SIZE + 1) + column;
                        for (int m = 0; m < span; m += 4) {
                            for (int i = 0; i < 4; i++) {
                                sum += matrix[line + m + i] * matrix[first + (m + i) * SIZE];
                            }
                        }
                        between[n] = sum;
                    } else {
                        const int first = n - (row << bits);
                        for (int m = 0; m <= row; m += 4) {
                            for (int i = 0; i < 4; i++) {
                                const float read = between[first + (m + i << bits)];
                                sum += matrix[line + span + m + i] * read;
                            }
                        }
                        matrix[line + column] = -sum;
                    }
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
    for (int row = mine / SIZE; row < size; row += THREADS / SIZE) {
        const int column = mine % SIZE;
        if (column < size) inverse[origin + row * size + column] = matrix[row * SIZE + column];
    }
"""

_THREAD = """
    const int mine = simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup;
    const size_t head = threadgroup_position_in_grid.z;
    const size_t chunk = head * threadgroups_per_grid.y + threadgroup_position_in_grid.y;
    threadgroup float matrix[SIZE * SIZE];
"""

_inverse_kernel = mx.fast.metal_kernel(
    name="gated_delta_rule_inverse",
    input_names=["lower"],  # (B, H, chunks, C, C)
    output_names=["inverse"],
    source=_THREAD
    + """
    const int size = lower_shape[3];
    const int rows = (size + 3) / 4 * 4;
    const size_t origin = chunk * size * size;
    for (int n = mine; n < rows * SIZE; n += THREADS) {
        const int row = n / SIZE;
        const int column = n % SIZE;
        const bool is_read = row < size && column < row;
        matrix[n] = is_read ? lower[origin + row * size + column] : row == column ? 1.0f : 0.0f;
    }
    """
    + _INVERSE,
)

# A thread goes down a column of the matrix, or a part of it, with the product of the gates so far.
_between_kernel = mx.fast.metal_kernel(
    name="gated_delta_rule_between",
    # queries by keys and reads by keys, (B, H, chunks, C, C); (B, H, L, 1)
    input_names=["asked", "read", "f"],
    # (B, H, chunks, C, C) twice; (B, H, chunks, C, 1) three times, (B, H, chunks, 1, 1)
    output_names=["weights", "inverse", "until", "before", "after", "through"],
    source=_THREAD
    + """
    constexpr int ROWS = SIZE * SIZE / THREADS;
    const int size = asked_shape[3];
    const int rows = (size + 3) / 4 * 4;
    const int length = f_shape[2];
    const size_t origin = chunk * size * size;
    threadgroup float gates[SIZE];
    if (mine < SIZE) {
        const int position = threadgroup_position_in_grid.y * size + mine;
        const bool is_read = mine < size && position < length;
        gates[mine] = is_read ? f[head * length + position] : 1.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (mine < size) {
        float earlier = 1;
        for (int n = 0; n < mine; n++) earlier *= gates[n];
        float later = 1;
        for (int n = mine + 1; n < size; n++) later *= gates[n];
        before[chunk * size + mine] = earlier;
        until[chunk * size + mine] = earlier * gates[mine];
        after[chunk * size + mine] = later;
        if (mine == size - 1) through[chunk] = earlier * gates[mine];
    }
    const int column = mine % SIZE;
    const int first = mine / SIZE * ROWS;
    float decay = 1;
    for (int n = column + 1; n < first; n++) decay *= gates[n];
    for (int row = first; row < min(first + ROWS, rows); row++) {
        const bool is_read = row < size && column < row;
        const size_t at = origin + row * size + column;
        matrix[row * SIZE + column] = is_read ? read[at] * decay : row == column ? 1.0f : 0.0f;
        if (column < row) decay *= gates[row];
        if (row < size && column < size) weights[at] = column > row ? 0.0f : asked[at] * decay;
    }
    """
    + _INVERSE,
)

_LEAD = """
    const int dims = state_shape[3];
    const int keys = state_shape[2];
    const int size = reads_shape[3];
    const size_t chunks = reads_shape[2];
    const int lane = thread_index_in_simdgroup;
    const int part = simdgroup_index_in_threadgroup;
    const int column = (threadgroup_position_in_grid.x * 32 + lane) * COLUMNS;
    const bool is_inside = column < dims;
    const size_t head = threadgroup_position_in_grid.y;
    const int first = part * PIECE;
    const int place = is_inside ? first * dims + column : 0;
    threadgroup float sums[PARTS * STEPS * COLUMNS * 32];
    threadgroup float news[SIZE * COLUMNS * 32];
    float piece[PIECE][COLUMNS];
    const auto given = state + head * keys * dims;
    for (int i = 0; i < PIECE; i++) {
        const bool is_held = FULL || first + i < keys;
        const int at = place + (is_held ? i * dims : 0);
        for (int c = 0; c < COLUMNS; c++) piece[i][c] = is_held ? given[at + c] : 0.0f;
    }
    for (size_t chunk = head * chunks; chunk < (head + 1) * chunks; chunk++) {
        // from here offsets are the same for all threads, which then need no registers for them
        const auto kept = before + (chunk * keys * dims + place);
        for (int i = 0; i < PIECE; i++) {
            if (is_inside && (FULL || first + i < keys)) {
                for (int c = 0; c < COLUMNS; c++) kept[i * dims + c] = piece[i][c];
            }
        }
        // what each row reads of the state, from all its segments, a few rows at a time
        const auto read = reads + chunk * size * keys + first;
        const auto value = v + chunk * size * dims;
        const auto out = written + chunk * size * dims;
        for (int start = 0; start < size; start += STEPS) {
            for (int n = 0; n < min(STEPS, size - start); n++) {
                const auto row = read + (start + n) * keys;
                float sum[COLUMNS] = {};
                for (int i = 0; i < PIECE; i++) {
                    const float number = row[FULL || first + i < keys ? i : 0];
                    for (int c = 0; c < COLUMNS; c++) sum[c] = fma(number, piece[i][c], sum[c]);
                }
                for (int c = 0; c < COLUMNS; c++) {
                    sums[((part * STEPS + n) * COLUMNS + c) * 32 + lane] = sum[c];
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (int m = part; m < STEPS * COLUMNS; m += PARTS) {
                const int row = start + m / COLUMNS;
                float sum = 0;
                for (int p = 0; p < PARTS && row < size; p++) {
                    sum += sums[(p * STEPS * COLUMNS + m) * 32 + lane];
                }
                const int at = row * dims + column + m % COLUMNS;
                const bool is_written = is_inside && row < size;
                const float left = is_written ? value[at] - sum : 0.0f;
                if (row < size) news[(row * COLUMNS + m % COLUMNS) * 32 + lane] = left;
                if (is_written) out[at] = left;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        <more>
        <gates>
        for (int i = 0; i < PIECE; i++) {
            const bool is_held = FULL || first + i < keys;
            const float gate = <gate>;
            const int at = is_held ? i * dims : 0;
            for (int c = 0; c < COLUMNS; c++) piece[i][c] = gate * piece[i][c]<added>;
        }
        const auto key = own + chunk * size * keys + first;
        for (int n = 0; n < size; n++) {
            const auto row = key + n * keys;
            float left[COLUMNS];
            for (int c = 0; c < COLUMNS; c++) left[c] = news[(n * COLUMNS + c) * 32 + lane];
            for (int i = 0; i < PIECE; i++) {
                const bool is_held = FULL || first + i < keys;
                const float found = row[is_held ? i : 0];
                const float number = is_held ? found : 0.0f;
                for (int c = 0; c < COLUMNS; c++) piece[i][c] = fma(number, left[c], piece[i][c]);
            }
        }
    }
    const auto end = last + head * keys * dims;
    for (int i = 0; i < PIECE; i++) {
        if (is_inside && (FULL || first + i < keys)) {
            for (int c = 0; c < COLUMNS; c++) end[place + i * dims + c] = piece[i][c];
        }
    }
"""

_GATES = {
    "head": "gates[chunk]",
    "channel": "of_chunk[is_held ? i : 0]",
}


def _lead_kernel(gate: str, has_more: bool) -> Any:
    gates = "const auto of_chunk = gates + chunk * keys + first;" if gate == "channel" else ""
    text = _LEAD.replace("<gates>", gates).replace("<gate>", _GATES[gate])
    return mx.fast.metal_kernel(
        name=f"gated_delta_rule_lead_{gate}{'_more' if has_more else ''}",
        # (B, H, chunks, K or 1, 1), (B, H, chunks, C, K) twice, (B, H, chunks, C, V), (B, H, K, V),
        # (B, H, chunks, K, V)
        input_names=["gates", "own", "reads", "v", "state", *(["added"] if has_more else [])],
        # (B, H, chunks, K, V), (B, H, chunks, C, V), (B, H, K, V)
        output_names=["before", "written", "last"],
        source=text.replace(
            "<added>", " + (is_held ? more[at + c] : 0.0f)" if has_more else ""
        ).replace(
            "<more>", "const auto more = added + (chunk * keys * dims + place);" if has_more else ""
        ),
    )


_lead_kernels = {
    (gate, has_more): _lead_kernel(gate, has_more) for gate in _GATES for has_more in (False, True)
}


def inverse_in_one_launch(lower: mx.array) -> mx.array:
    """Like `definition.inverse_of`."""
    (inverse,) = _of_chunks(_inverse_kernel, [lower], [lower.shape])
    return inverse


def _of_chunks(
    kernel: Any, inputs: list[mx.array], shapes: list[tuple[int, ...]]
) -> list[mx.array]:
    """The operation of a kernel with a threadgroup for each chunk."""
    batch, heads, chunks = inputs[0].shape[:3]
    return launch.launch(
        kernel,
        inputs=inputs,
        template=[("SIZE", CHUNK_LENGTH), ("THREADS", _THREADS)],
        grid=(_THREADS, chunks, batch * heads),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=shapes,
        output_dtypes=[mx.float32] * len(shapes),
    )


def columns_and_segment(keys: int, values: int, has_more: bool) -> tuple[int, int]:
    """The columns of a thread, and the rows of them that it holds, by what registers suffice for."""
    is_filled = values % _COLUMNS == 0 and values >= launch.SIMD_GROUP * _COLUMNS
    if is_filled and keys <= 8 * _SEGMENT and keys % _SEGMENT == 0 and not has_more:
        return _COLUMNS, _SEGMENT
    return 1, _SEGMENT if keys <= 16 * _SEGMENT else 2 * _SEGMENT


def _led_in_one_launch(
    gates: mx.array,
    keys: mx.array,
    reads: mx.array,
    values: mx.array,
    state: mx.array,
    added: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Like `definition.lead`."""
    batch, heads, dims, width = state.shape
    gate = "channel" if gates.shape[3] == dims else "head"
    columns, segment = columns_and_segment(dims, width, added is not None)
    parts = -(-dims // segment)
    threads = launch.SIMD_GROUP * parts
    before, written, last = launch.launch(
        _lead_kernels[gate, added is not None],
        inputs=[gates, keys, reads, values, state, *([] if added is None else [added])],
        template=[
            ("PIECE", segment),
            ("PARTS", parts),
            ("COLUMNS", columns),
            ("STEPS", max(launch.SIMD_GROUP // parts, 1)),
            ("SIZE", CHUNK_LENGTH),
            ("FULL", dims % segment == 0),
        ],
        grid=(-(-width // (launch.SIMD_GROUP * columns)) * threads, batch * heads, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*gates.shape[:3], dims, width), values.shape, state.shape],
        output_dtypes=[mx.float32] * 3,
    )
    return before, written, last


def lead_in_one_launch(*arrays: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Like `definition.lead`, forwards and backwards in one launch, however many chunks there are."""
    before, written, last = _with_gradient(*arrays)
    return before, written, last


def _gradient(
    inputs: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> tuple[mx.array, ...]:
    return lead_gradient(inputs, cotangents, outputs, lead_in_one_launch)


_with_gradient = with_reference_gradient(
    _led_in_one_launch, lead, _gradient, is_differentiable=True
)


def _with_gates_of_heads(inputs: Inputs) -> Chunks:
    """Like `parallel_part`, with chunks of about the same length."""
    q, k, v, a, f, *_ = inputs
    length = v.shape[2]
    size = -(-length // -(-length // CHUNK_LENGTH))
    q, k, v, a = (in_chunks(x, size) for x in (q, k, v, a))
    keys = k.swapaxes(-1, -2)
    square, column = (*q.shape[:4], size), (*q.shape[:4], 1)
    weights, inverse, until, before, after, gates = _of_chunks(
        _between_kernel,
        [q @ keys, a @ keys, f],
        [square, square, column, column, column, (*q.shape[:3], 1, 1)],
    )
    return Chunks(gates, k * after, inverse @ (a * before), inverse @ v, q * until, weights)


def in_launches(inputs: Inputs) -> tuple[mx.array, mx.array]:
    """The operation in chunks, of which nothing is stored for the gradient."""
    if inputs.b is None and inputs.f.shape[3] < inputs.q.shape[3]:
        chunks = _with_gates_of_heads(inputs)
    else:
        chunks = parallel_part(inputs, inverse_in_one_launch)
    return led(chunks, inputs.state, inputs.v.shape[2], _led_in_one_launch)
