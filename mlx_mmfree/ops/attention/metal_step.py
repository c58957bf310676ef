"""The Metal kernel for attention of one token: norms, rotation, softmax and gate in one launch.

Some threadgroups, the parts, share the slots of a query head, and the SIMD groups of all of them take
slots in turn, with sums of their own until the end. A second launch adds up the sums of several parts.
The cache is only read. The tail comes out anew with the token's key and value in it, which is as much as
an update of it would copy while the step before is still computed.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any

import mlx.core as mx

from ..backend import launch
from ..backend.metal_functions import SIGMOID

MAX_DIMS = 256
"""The most dims of a head, of which a lane keeps 8 of the query and of the sums."""

SIMD_GROUPS = 16
"""The SIMD groups of a threadgroup."""

_FEW_SLOTS, _MANY_SLOTS = 512, 4096
_UNEVEN = 1.25


def parts_of(heads: int, slots: int, cores: Sequence[int]) -> int:
    """The parts in which the slots of a head are read, so that GPU cores have even shares.

    Args:
        heads: Query heads of all rows.
        slots: Slots of the cache. Where they are few, what a part takes beside them would outweigh the
            gain. Where they are many, each core gets four parts, which suits every smaller chip too.
        cores: Numbers of cores on which the busiest may have 1.25 times the mean at most.
    """
    if slots < _FEW_SLOTS:
        return 1
    if slots >= _MANY_SLOTS:
        return -(-4 * max(cores) // heads)
    return next(
        parts
        for parts in count(1)
        if all(-(-heads * parts // n) * n <= _UNEVEN * heads * parts for n in cores)
    )


_FUNCTIONS = """
template <typename C, int EACH>
inline void read_slot(
    const device C* key, const device C* value, const thread float (&query)[EACH],
    thread float& most, thread float& total, thread float (&sum)[EACH]) {
    float score = 0;
    #pragma clang loop unroll(full)
    for (int n = 0; n < EACH; n++) score += query[n] * static_cast<float>(key[n]);
    score = simd_sum(score);
    const float more = max(most, score);
    const float kept = precise::exp(most - more), weight = precise::exp(score - more);
    most = more;
    total = total * kept + weight;
    #pragma clang loop unroll(full)
    for (int n = 0; n < EACH; n++) sum[n] = sum[n] * kept + weight * static_cast<float>(value[n]);
}
template <typename C, int EACH>
inline void write_slot(device C* slot, const thread C (&numbers)[EACH]) {
    #pragma clang loop unroll(full)
    for (int n = 0; n < EACH; n++) slot[n] = numbers[n];
}
"""

_SOURCE = """
    const int groups = keys_shape[1];
    const int room = keys_shape[2];
    const int slots = tail_keys_shape[2];
    constexpr int WIDE = GATED ? 2 : 1;
    const int heads = (projected_shape[2] / DIMS - 2 * groups) / WIDE;
    const int shared_by = heads / groups;
    const int lane = thread_index_in_simdgroup;
    const int group = simdgroup_index_in_threadgroup;
    const int head = threadgroup_position_in_grid.x;
    const size_t row = threadgroup_position_in_grid.y;
    const int part = threadgroup_position_in_grid.z;
    const int parts = threadgroups_per_grid.z;
    const int key_head = head / shared_by;
    constexpr int EACH = DIMS / 32;
    threadgroup float turned[2 * DIMS];
    threadgroup float largest[SIMD_GROUPS];
    threadgroup float totals[SIMD_GROUPS];
    threadgroup float sums[SIMD_GROUPS * DIMS];

    const auto token = projected + row * projected_shape[2];
    const auto new_value = token + (WIDE * heads + groups + key_head) * DIMS;
    // one SIMD group norms the query, another the key
    if (group < 2) {
        const auto own = token + (group == 0 ? WIDE * head : WIDE * heads + key_head) * DIMS;
        float squares = 0;
        #pragma clang loop unroll(full)
        for (int n = 0; n < EACH; n++) {
            const float number = static_cast<float>(own[lane * EACH + n]);
            squares += number * number;
        }
        const float factor = NORMED
            ? precise::rsqrt(simd_sum(squares) / static_cast<float>(DIMS) + eps) : 1.0f;
        #pragma clang loop unroll(full)
        for (int n = 0; n < EACH; n++) {
            const int dim = lane * EACH + n;
            float number = static_cast<float>(own[dim]);
            if (NORMED) {
                number *= factor * static_cast<float>(group == 0 ? query_norm[dim] : key_norm[dim]);
            }
            turned[group * DIMS + dim] = number;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        const size_t angles = cosines_shape[0] == 1 ? 0 : row * PAIRS;
        for (int pair = lane; pair < PAIRS; pair += 32) {
            const int first = group * DIMS + (INTERLEAVED ? 2 * pair : pair);
            const int second = first + (INTERLEAVED ? 1 : PAIRS);
            const float cosine = static_cast<float>(cosines[angles + pair]);
            const float sine = static_cast<float>(sines[angles + pair]);
            const float a = turned[first], b = turned[second];
            turned[first] = a * cosine - b * sine;
            turned[second] = a * sine + b * cosine;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const size_t own = row * groups + key_head;
    float query[EACH];
    C own_key[EACH];
    C own_value[EACH];
    float sum[EACH] = {};
    #pragma clang loop unroll(full)
    for (int n = 0; n < EACH; n++) {
        const int dim = lane * EACH + n;
        query[n] = turned[dim] * precise::rsqrt(static_cast<float>(DIMS));
        // as the cache holds them
        own_key[n] = static_cast<C>(turned[DIMS + dim]);
        own_value[n] = static_cast<C>(new_value[dim]);
    }
    const int first = SIMD_GROUPS * part + group;
    const int step = SIMD_GROUPS * parts;
    float most = -INFINITY, total = 0;
    if (first == 0) {
        // the token itself
        most = 0;
        #pragma clang loop unroll(full)
        for (int n = 0; n < EACH; n++) {
            most += query[n] * static_cast<float>(own_key[n]);
            sum[n] = static_cast<float>(own_value[n]);
        }
        most = simd_sum(most);
        total = 1;
    }
    const auto own_keys = keys + own * room * DIMS + lane * EACH;
    const auto own_values = values + own * room * DIMS + lane * EACH;
    const int end = min(starts[row], room);
    for (int place = first; place < end; place += step) {
        // numbers of 32 bits are enough from here
        const uint at = static_cast<uint>(place * DIMS);
        if (!WINDOWED || seen[row * room + place]) {
            read_slot<C, EACH>(own_keys + at, own_values + at, query, most, total, sum);
        }
    }
    const size_t tail = own * slots * DIMS + lane * EACH;
    const auto last_keys = tail_keys + tail;
    const auto last_values = tail_values + tail;
    const int tokens = min(count[0], slots - 1);
    for (int place = first; place < tokens; place += step) {
        const uint at = static_cast<uint>(place * DIMS);
        read_slot<C, EACH>(last_keys + at, last_values + at, query, most, total, sum);
    }
    // one head of those that share a key writes the tail that comes out
    const int written = head % shared_by == 0 ? slots : 0;
    for (int place = first; place < written; place += step) {
        const uint at = static_cast<uint>(place * DIMS);
        if (place == tokens) {
            write_slot<C, EACH>(new_keys + tail + at, own_key);
            write_slot<C, EACH>(new_values + tail + at, own_value);
            continue;
        }
        C key[EACH];
        C value[EACH];
        #pragma clang loop unroll(full)
        for (int n = 0; n < EACH; n++) key[n] = last_keys[at + n];
        #pragma clang loop unroll(full)
        for (int n = 0; n < EACH; n++) value[n] = last_values[at + n];
        write_slot<C, EACH>(new_keys + tail + at, key);
        write_slot<C, EACH>(new_values + tail + at, value);
    }
    if (lane == 0) largest[group] = most;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float top = simd_max(lane < SIMD_GROUPS ? largest[lane] : -INFINITY);
    // of a SIMD group, or all of a part, that has read nothing
    const float kept = most == -INFINITY ? 0.0f : precise::exp(most - top);
    if (lane == 0) totals[group] = total * kept;
    #pragma clang loop unroll(full)
    for (int n = 0; n < EACH; n++) sums[group * DIMS + lane * EACH + n] = sum[n] * kept;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float all = simd_sum(lane < SIMD_GROUPS ? totals[lane] : 0.0f);
    const size_t result = row * heads + head;
    for (int dim = 32 * group + lane; dim < DIMS; dim += 32 * SIMD_GROUPS) {
        float read = 0;
        for (int g = 0; g < SIMD_GROUPS; g++) read += sums[g * DIMS + dim];
"""

_INPUTS = [
    # (B, 1, W), (B, G, C, K) twice, (B, G, T, K) twice, (B,), (B, C) of booleans, (1,),
    *("projected", "keys", "values", "tail_keys", "tail_values", "starts", "seen", "count"),
    # (1 or B, 1, PAIRS) twice, (K,) twice, ()
    *("cosines", "sines", "query_norm", "key_norm", "eps"),
]
_TAIL = ["new_keys", "new_values"]  # (B, G, T, K)

_WHOLE = """        read /= all;
        if (GATED) read *= sigmoid(static_cast<float>(token[(2 * head + 1) * DIMS + dim]));
        y[result * DIMS + dim] = static_cast<T>(read);
    }
"""

_PART = """        sums_of_parts[(result * parts + part) * DIMS + dim] = read;
    }
    if (group == 0 && lane == 0) {
        scales[2 * (result * parts + part)] = top;
        scales[2 * (result * parts + part) + 1] = all;
    }
"""

_of_whole = mx.fast.metal_kernel(
    name="attention_step",
    input_names=_INPUTS,
    output_names=[*_TAIL, "y"],  # (B, 1, H K)
    header=SIGMOID + _FUNCTIONS,
    source=_SOURCE + _WHOLE,
)
_of_parts = mx.fast.metal_kernel(
    name="attention_step_parts",
    input_names=_INPUTS,
    output_names=[*_TAIL, "sums_of_parts", "scales"],  # (B, H, P, K), (B, H, P, 2)
    header=SIGMOID + _FUNCTIONS,
    source=_SOURCE + _PART,
)
_join = mx.fast.metal_kernel(
    name="attention_step_join",
    input_names=["sums_of_parts", "scales", "projected"],
    output_names=["y"],
    header=SIGMOID,
    source="""
    const int parts = scales_shape[2];
    const int heads = scales_shape[1];
    const int head = threadgroup_position_in_grid.x;
    const size_t row = threadgroup_position_in_grid.y;
    const int dim = thread_index_in_threadgroup;
    const auto own = scales + 2 * (row * heads + head) * parts;
    float top = own[0];
    for (int part = 1; part < parts; part++) top = max(top, own[2 * part]);
    float all = 0, read = 0;
    for (int part = 0; part < parts; part++) {
        const float kept = precise::exp(own[2 * part] - top);
        all += own[2 * part + 1] * kept;
        read += sums_of_parts[((row * heads + head) * parts + part) * DIMS + dim] * kept;
    }
    read /= all;
    if (GATED) {
        const auto token = projected + row * projected_shape[2];
        read *= sigmoid(static_cast<float>(token[(2 * head + 1) * DIMS + dim]));
    }
    y[(row * heads + head) * DIMS + dim] = static_cast<T>(read);
    """,
)


def one_token(
    projected: mx.array,
    cache: Sequence[mx.array],
    tail: Sequence[mx.array],
    counts: Sequence[mx.array],
    angles: Sequence[mx.array],
    norms: Sequence[mx.array],
    *,
    num_heads: int,
    eps: float,
    is_interleaved: bool,
    is_gated: bool,
    is_windowed: bool,
    parts: int,
) -> list[mx.array]:
    """The tail with a token's key and value in it, and its result.

    Args:
        projected: Heads of queries, each with its gate after it if there are some, keys and values.
        cache: Keys and values, `(B, G, C, K)`.
        tail: Keys and values of the last tokens, `(B, G, T, K)`.
        counts: How many tokens of each row the cache holds, `(B,)`, which of its slots are seen,
            booleans `(B, C)` that count with a window alone, and how many tokens are in the tail,
            `(1,)`, fewer than `T`.
        angles: Cosines and sines of the rotation, `(1 or B, 1, R / 2)`; none without one.
        norms: Weights of the norms of queries and keys; none without them.
        num_heads: Query heads.
        eps: Epsilon of both norms.
        is_interleaved: Whether rotated pairs are neighbours.
        is_gated: Whether there are gates.
        is_windowed: Whether some slots of the cache are not seen.
        parts: The parts in which the slots of a head are read.

    Returns:
        `(B, G, T, K)` twice, and `(B, 1, H K)`.
    """
    keys = cache[0]
    batch, _, _, dims = keys.shape
    threads = launch.SIMD_GROUP * SIMD_GROUPS
    # the cache stands in for what the kernel does not read
    weights = [keys, keys] if not norms else list(norms)
    turns: list[Any] = [keys, keys] if not angles else list(angles)
    call: dict[str, Any] = {
        "inputs": [
            *(projected, *cache, *tail, *counts, *turns, *weights, mx.array(eps, mx.float32))
        ],
        "grid": (threads * num_heads, batch, parts),
        "threadgroup": (threads, 1, 1),
    }
    template: list[tuple[str, Any]] = [
        ("T", projected.dtype),
        ("C", keys.dtype),
        ("DIMS", dims),
        ("PAIRS", angles[0].shape[2] if angles else 0),
        ("NORMED", bool(norms)),
        ("INTERLEAVED", is_interleaved),
        ("GATED", is_gated),
        ("WINDOWED", is_windowed),
        ("SIMD_GROUPS", SIMD_GROUPS),
    ]
    shapes, dtypes = [each.shape for each in tail], [each.dtype for each in tail]
    result = batch, 1, num_heads * dims
    if parts == 1:
        return launch.launch(
            _of_whole,
            **call,
            template=template,
            output_shapes=[*shapes, result],
            output_dtypes=[*dtypes, projected.dtype],
        )
    sums = batch, num_heads, parts
    *written, read, scales = launch.launch(
        _of_parts,
        **call,
        template=template,
        output_shapes=[*shapes, (*sums, dims), (*sums, 2)],
        output_dtypes=[*dtypes, mx.float32, mx.float32],
    )
    merged = launch.launch(
        _join,
        inputs=[read, scales, projected],
        template=[("T", projected.dtype), ("DIMS", dims), ("GATED", is_gated)],
        grid=(dims * num_heads, batch, 1),
        threadgroup=(dims, 1, 1),
        output_shapes=[result],
        output_dtypes=[projected.dtype],
    )
    return [*written, *merged]
