"""`mlgru_step` on Metal for many positions, in two launches: the scan with its gates, and the output.

A second launch gates the output, because its norm needs all channels of a position, whereas the scan
runs some channels over all positions.
"""

import mlx.core as mx

from ..backend.metal_functions import SIGMOID
from ..gated_rms_norm.metal import gated
from ..linear_scan.metal_scan import forward_scan, launch_scan
from .metal_form import Form

_kernel = mx.fast.metal_kernel(
    name="mlgru_scan",
    # (B, L, 3E), (B, E), (E,) if BOUNDED, (B, L) if MASKED, (B, L) if STARTS
    input_names=["gates", "state", "lower_bound", "valid", "starts"],
    output_names=["states", "last"],  # (B, L, E), (B, E)
    header=SIGMOID,
    source=forward_scan(
        """
    const int length = gates_shape[1];
    const int dims = state_shape[1];
        """,
        """
            const Place inputs = 3 * at - 2 * channel;
            float gate = sigmoid(static_cast<float>(gates[inputs + dims]));
            if (BOUNDED) {
                const float bound = static_cast<float>(lower_bound[channel]);
                gate = bound + (1.0f - bound) * gate;
            }
            const float candidate = static_cast<float>(gates[inputs]);
            float input = candidate * sigmoid(candidate) * (1.0f - gate);
            if (STARTS && static_cast<bool>(starts[first_step + t])) gate = 0;
            if (MASKED && !static_cast<bool>(valid[first_step + t])) {
                gate = 1;
                input = 0;
            }
        """,
    ),
)


def in_two_launches(
    form: Form, *arrays: mx.array, place: mx.Dtype | None = None
) -> tuple[mx.array, mx.array]:
    """Output and last state."""
    (gates, state, weight), options = form.nested(arrays)
    batch, length, _ = gates.shape
    # the gates stand in for what the kernel does not read
    optional = [gates if array is None else array for array in options[1:]]
    states, last = launch_scan(
        _kernel,
        [gates, state, *optional],
        [(batch, length, state.shape[1]), state.shape],
        place,
        [("BOUNDED", form.is_bounded), ("MASKED", form.is_masked), ("STARTS", form.has_starts)],
    )
    return gated(form.eps, gates, states, weight), last
