"""`mlgru_step` on Metal for one position, in one launch with a threadgroup for each sequence."""

import mlx.core as mx

from ..backend import launch
from ..backend.metal_functions import SIGMOID, SUM_OF_THREADGROUP
from .metal_form import Form

MAX_THREADS = 512
CHANNELS_PER_THREAD = 4

_kernel = mx.fast.metal_kernel(
    name="mlgru_step",
    # (B, 3E), (B, E), (E,), (E,) if BOUNDED, (B, 1) if MASKED, ()
    input_names=["gates", "state", "weight", "lower_bound", "valid", "eps"],
    output_names=["out", "last"],  # (B, E), (B, E)
    header=SIGMOID + SUM_OF_THREADGROUP,
    source="""
    const uint dims = state_shape[1];
    const uint index = thread_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const uint group = simdgroup_index_in_threadgroup;
    const uint groups = simdgroups_per_threadgroup;
    const uint row = threadgroup_position_in_grid.x;
    const size_t start = static_cast<size_t>(row) * dims;
    const auto values = gates + 3 * start;
    const auto forgets = values + dims;
    const auto shown = forgets + dims;
    const auto olds = state + start;
    const auto outs = out + start;
    const auto lasts = last + start;
    threadgroup float group_squares[32];

    float squares = 0;
    for (uint first = 4 * index; first < dims; first += 128 * groups) {
        #pragma clang loop unroll(full)
        for (uint k = 0; k < 4; k++) {
            if (WHOLE_FOURS || first + k < dims) {
                const float gate = static_cast<float>((shown + first)[k]);
                squares += gate * gate;
            }
        }
    }
    squares = sum_of_threadgroup(squares, group_squares, lane, group, groups);
    const float factor = precise::rsqrt(squares / static_cast<float>(dims) + eps);
    const bool stays = MASKED && !static_cast<bool>(valid[row]);
    for (uint first = 4 * index; first < dims; first += 128 * groups) {
        float results[4];
        float states[4];
        #pragma clang loop unroll(full)
        for (uint n = 0; n < 4; n++) {
            // behind the last channel those of the last one
            const uint k = WHOLE_FOURS ? n : min(n, dims - 1 - first);
            float f = sigmoid(static_cast<float>((forgets + first)[k]));
            if (BOUNDED) {
                const float bound = static_cast<float>((lower_bound + first)[k]);
                f = bound + (1.0f - bound) * f;
            }
            const float value = static_cast<float>((values + first)[k]);
            const float old = static_cast<float>((olds + first)[k]);
            const float h = stays ? old : f * old + value * sigmoid(value) * (1.0f - f);
            const float normed = static_cast<float>((shown + first)[k]) * factor
                * static_cast<float>((weight + first)[k]);
            results[n] = normed * h * sigmoid(h);
            states[n] = h;
        }
        #pragma clang loop unroll(full)
        for (uint k = 0; k < 4; k++) {
            if (WHOLE_FOURS || first + k < dims) {
                (outs + first)[k] = static_cast<T>(results[k]);
                (lasts + first)[k] = states[k];
            }
        }
    }
    """,
)


def in_one_launch(form: Form, *arrays: mx.array) -> tuple[mx.array, mx.array]:
    """Output and last state."""
    (gates, state, weight), options = form.nested(arrays)
    _, lower_bound, valid, _ = options
    batch, dims = state.shape
    groups = -(-dims // (launch.SIMD_GROUP * CHANNELS_PER_THREAD))
    threads = min(launch.SIMD_GROUP * groups, MAX_THREADS)
    y, last = launch.launch(
        _kernel,
        inputs=[
            gates.reshape(batch, 3 * dims),
            state,
            weight,
            # the state stands in for what the kernel does not read
            state if lower_bound is None else lower_bound,
            state if valid is None else valid,
            mx.array(form.eps, mx.float32),
        ],
        template=[
            ("T", gates.dtype),
            ("BOUNDED", form.is_bounded),
            ("MASKED", form.is_masked),
            ("WHOLE_FOURS", dims % CHANNELS_PER_THREAD == 0),
        ],
        grid=(threads * batch, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(batch, dims), (batch, dims)],
        output_dtypes=[gates.dtype, mx.float32],
    )
    return y.reshape(batch, 1, dims), last
