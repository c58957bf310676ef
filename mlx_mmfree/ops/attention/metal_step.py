"""The Metal kernel for attention of one token: norms, rotation, softmax and gate in one launch.

A threadgroup computes a query head. Its SIMD groups share the slots, and keep sums of their own until
the end. The token's own key and value are not read from the cache, which MLX lets no kernel change: they
come out beside the result, and one update each puts them there.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend import launch
from ..backend.metal_functions import SIGMOID

MAX_DIMS = 256
"""The most dims of a head, of which a lane keeps 8 of the query and of the sums."""

MAX_SLOTS = 4096
"""The most slots that one threadgroup reads; MLX spreads more over several."""

_SIMD_GROUPS = 16

_kernel = mx.fast.metal_kernel(
    name="attention_step",
    # (B, 1, W), (B, G, C, K) twice, (1,) or (B, 1), (B, N), (1 or B, 1, PAIRS) twice, (K,) twice, ()
    input_names=[
        *("projected", "keys", "values", "slots", "held", "cosines", "sines"),
        *("query_norm", "key_norm", "eps"),
    ],
    output_names=["y", "new_keys", "new_values"],  # (B, 1, H K), (B, G, 1, K) twice
    header=SIGMOID,
    source="""
    const int groups = keys_shape[1];
    const int room = keys_shape[2];
    const int count = held_shape[1];
    constexpr int WIDE = GATED ? 2 : 1;
    const int heads = (projected_shape[2] / DIMS - 2 * groups) / WIDE;
    const int shared_by = heads / groups;
    const int lane = thread_index_in_simdgroup;
    const int group = simdgroup_index_in_threadgroup;
    const int head = threadgroup_position_in_grid.x;
    const size_t row = threadgroup_position_in_grid.y;
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
    const size_t cache = (row * groups + key_head) * room * DIMS + lane * EACH;
    const int slot = slots[slots_shape[0] == 1 ? 0 : row];
    float query[EACH];
    float own_key[EACH];
    float own_value[EACH];
    float sum[EACH] = {};
    #pragma clang loop unroll(full)
    for (int n = 0; n < EACH; n++) {
        const int dim = lane * EACH + n;
        query[n] = turned[dim] * precise::rsqrt(static_cast<float>(DIMS));
        // as the cache holds them
        const C key = static_cast<C>(turned[DIMS + dim]);
        const C value = static_cast<C>(new_value[dim]);
        own_key[n] = static_cast<float>(key);
        own_value[n] = static_cast<float>(value);
        if (group == 0 && head % shared_by == 0) {
            new_keys[(row * groups + key_head) * DIMS + dim] = key;
            new_values[(row * groups + key_head) * DIMS + dim] = value;
        }
    }
    float most = -INFINITY, total = 0;
    if (group == 0) {
        // the token itself
        most = 0;
        #pragma clang loop unroll(full)
        for (int n = 0; n < EACH; n++) {
            most += query[n] * own_key[n];
            sum[n] = own_value[n];
        }
        most = simd_sum(most);
        total = 1;
    }
    const auto seen = held + row * count;
    // without a window, all tokens lie before this one
    const int end = WINDOWED ? count : min(count, slot);
    const auto own_keys = keys + cache;
    const auto own_values = values + cache;
    for (int place = group; place < end; place += SIMD_GROUPS) {
        // numbers of 32 bits are enough from here
        const auto key = own_keys + static_cast<uint>(place * DIMS);
        const auto value = own_values + static_cast<uint>(place * DIMS);
        if (!WINDOWED || (place != slot && seen[place] >= 0)) {
            float score = 0;
            #pragma clang loop unroll(full)
            for (int n = 0; n < EACH; n++) score += query[n] * static_cast<float>(key[n]);
            score = simd_sum(score);
            const float more = max(most, score);
            const float kept = precise::exp(most - more), weight = precise::exp(score - more);
            most = more;
            total = total * kept + weight;
            #pragma clang loop unroll(full)
            for (int n = 0; n < EACH; n++) {
                sum[n] = sum[n] * kept + weight * static_cast<float>(value[n]);
            }
        }
    }
    if (lane == 0) {
        largest[group] = most;
        totals[group] = total;
    }
    #pragma clang loop unroll(full)
    for (int n = 0; n < EACH; n++) sums[group * DIMS + lane * EACH + n] = sum[n];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float top = largest[0], all = 0;
    for (int g = 1; g < SIMD_GROUPS; g++) top = max(top, largest[g]);
    for (int g = 0; g < SIMD_GROUPS; g++) all += totals[g] * precise::exp(largest[g] - top);
    for (int dim = 32 * group + lane; dim < DIMS; dim += 32 * SIMD_GROUPS) {
        float read = 0;
        for (int g = 0; g < SIMD_GROUPS; g++) {
            read += sums[g * DIMS + dim] * precise::exp(largest[g] - top);
        }
        read /= all;
        if (GATED) read *= sigmoid(static_cast<float>(token[(2 * head + 1) * DIMS + dim]));
        y[(row * heads + head) * DIMS + dim] = static_cast<T>(read);
    }
    """,
)


def one_token(
    projected: mx.array,
    keys: mx.array,
    values: mx.array,
    places: Sequence[mx.array],
    angles: Sequence[mx.array],
    norms: Sequence[mx.array],
    *,
    num_heads: int,
    eps: float,
    is_interleaved: bool,
    is_gated: bool,
    is_windowed: bool,
) -> list[mx.array]:
    """The result of a token, and its key and value as the cache holds them.

    Args:
        projected: Heads of queries, each with its gate after it if there are some, keys and values.
        keys, values: The cache, `(B, G, C, K)`.
        places: The token's slots, and the position that each slot holds afterwards.
        angles: Cosines and sines of the rotation, `(1 or B, 1, R / 2)`; none without one.
        norms: Weights of the norms of queries and keys; none without them.
        num_heads: Query heads.
        eps: Epsilon of both norms.
        is_interleaved: Whether rotated pairs are neighbours.
        is_gated: Whether there are gates.
        is_windowed: Whether slots are taken again, so that the token's may lie among others.

    Returns:
        `(B, 1, H K)`, and `(B, G, 1, K)` twice.
    """
    batch, groups, _, dims = keys.shape
    slots, held = places
    threads = launch.SIMD_GROUP * _SIMD_GROUPS
    # the cache stands in for what the kernel does not read
    weights = [keys, keys] if not norms else list(norms)
    turns: list[Any] = [keys, keys] if not angles else list(angles)
    new = (batch, groups, 1, dims)
    return launch.launch(
        _kernel,
        inputs=[projected, keys, values, slots, held, *turns, *weights, mx.array(eps, mx.float32)],
        template=[
            ("T", projected.dtype),
            ("C", keys.dtype),
            ("DIMS", dims),
            ("PAIRS", angles[0].shape[2] if angles else 0),
            ("NORMED", bool(norms)),
            ("INTERLEAVED", is_interleaved),
            ("GATED", is_gated),
            ("WINDOWED", is_windowed),
            ("SIMD_GROUPS", _SIMD_GROUPS),
        ],
        grid=(threads * num_heads, batch, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(batch, 1, num_heads * dims), new, new],
        output_dtypes=[projected.dtype, keys.dtype, keys.dtype],
    )
