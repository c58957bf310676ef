"""The steps of a gated delta net before and after its recurrence (arXiv 2412.06464)."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx

from .activations import silu
from .backend import launch, self_check
from .backend.dispatch import FLOATS, Backend, Example, Operation, not_floats
from .backend.gradient import with_reference_gradient
from .backend.metal_functions import SIGMOID
from .norms import gated_rms_norm

UNIT_EPS = 1e-6
"""Added to the sum of squares of what is brought to length 1."""


class HeadSizes(NamedTuple):
    """The heads of a mixer with the delta rule.

    Attributes:
        key_heads: Heads of queries and keys.
        heads: Heads of values and states, a multiple.
        key_dim: Dims `K` of a key.
        value_dim: Dims `V` of a value.
        max_beta: The most that is replaced, 1 or 2.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    max_beta: int

    @property
    def channels(self) -> int:
        """The channels of queries, keys and values, which lie side by side."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


def delta_rule_inputs(
    qkv: mx.array,
    steps: mx.array,
    taps: mx.array,
    state: mx.array,
    decay_log: mx.array,
    step_bias: mx.array,
    sizes: HeadSizes,
) -> tuple[mx.array, ...]:
    r"""Convolves queries, keys and values, brings keys to length 1, and computes gates.

    .. math::
        z_t &= \mathrm{silu}\Big(\sum_i w_i \odot x_{t-T+1+i}\Big) = [q_t, k_t, v_t], \quad
        \hat k = k\,(k^\top k + 10^{-6})^{-1/2} \\
        f_t &= \exp(-e^{A}\,\mathrm{softplus}(a_t + d)), \quad \beta_t = m\,\sigma(b_t)

    for each head of values; some of them may share one of queries and keys. Computed in float32.

    Source: Yang et al., arXiv 2412.06464, as in flash-linear-attention.

    Args:
        qkv: Projected `x`, `(B, L, C)` or more columns, of which the first C count.
        steps: `b` and `a`, one after the other, `(B, L, 2H)` or more columns, of which the last count.
        taps: `w`, `(C, 1, T)`.
        state: The last inputs before, `(B, T - 1, C)`.
        decay_log: `A`, `(H,)`.
        step_bias: `d`, `(H,)`.
        sizes: The heads, and `m`.

    Returns:
        :math:`K^{-1/2} \hat q` and :math:`\beta \hat k`, `(B, H, L, K)`; `v`, `(B, H, L, V)`;
        :math:`f \hat k`, by which the state is read; `f`, `(B, H, L, 1)`, all float32; and the last
        inputs, in the dtype of `state`.

    Raises:
        ValueError: The shapes do not agree.

    Example:
        >>> sizes = HeadSizes(1, 2, 4, 8, 1)
        >>> parts = delta_rule_inputs(
        ...     mx.ones((1, 3, 24)), mx.ones((1, 3, 4)), mx.ones((24, 1, 4)), mx.zeros((1, 3, 24)),
        ...     mx.zeros(2), mx.zeros(2), sizes,
        ... )
        >>> [part.shape for part in parts][-2:]
        [(1, 2, 3, 1), (1, 3, 24)]
    """
    batch, channels, heads = qkv.shape[0], sizes.channels, sizes.heads
    before = taps.shape[-1] - 1
    fits = qkv.ndim == steps.ndim == 3 and qkv.shape[:2] == steps.shape[:2]
    if not fits or qkv.shape[2] < channels or steps.shape[2] < 2 * heads:
        raise ValueError(
            f"[delta_rule_inputs] 'qkv' and 'steps' must have shapes (B, L, {channels}) and "
            f"(B, L, {2 * heads}) or more columns but got {qkv.shape} and {steps.shape}."
        )
    if taps.shape != (channels, 1, before + 1) or state.shape != (batch, before, channels):
        raise ValueError(
            f"[delta_rule_inputs] 'taps' and 'state' must have shapes ({channels}, 1, T) and "
            f"({batch}, T - 1, {channels}) but got {taps.shape} and {state.shape}."
        )
    if decay_log.shape != (heads,) or step_bias.shape != (heads,):
        raise ValueError(
            f"[delta_rule_inputs] 'decay_log' and 'step_bias' must have shape ({heads},) but got "
            f"{decay_log.shape} and {step_bias.shape}."
        )
    parts: tuple[mx.array, ...] = _inputs(qkv, steps, taps, state, decay_log, step_bias, sizes)
    return parts


def causal_taps(window: mx.array, taps: mx.array, length: int) -> list[mx.array]:
    """The part of a window that each tap sees, `(B, T - 1 + L, C)`, `(B, L, C)`."""
    return [window[:, tap : tap + length] for tap in range(taps.shape[-1])]


def weighted_taps(seen: Sequence[mx.array], taps: mx.array) -> mx.array:
    """The sum of what taps see, times their weights `(C, 1, T)`."""
    y = taps[:, 0, 0] * seen[0]
    for tap in range(1, len(seen)):
        y = y + taps[:, 0, tap] * seen[tap]
    return y


def softplus(x: mx.array) -> mx.array:
    """`log(1 + exp(x))`."""
    return mx.logaddexp(x, mx.zeros((), x.dtype))


def unit_length(x: mx.array) -> mx.array:
    r"""Rows of length 1, :math:`x / \sqrt{\sum x^2 + 10^{-6}}`, in float32."""
    x = x.astype(mx.float32)
    return x * mx.rsqrt(x.square().sum(axis=-1, keepdims=True) + UNIT_EPS)


def convolved_heads(convolved: mx.array, sizes: HeadSizes) -> tuple[mx.array, mx.array, mx.array]:
    """Queries and keys `(B, H, L, K)`, of length 1, and values `(B, H, L, V)`, before the activation."""
    width = sizes.key_heads * sizes.key_dim
    parts = mx.split(silu(convolved.astype(mx.float32)), [width, 2 * width], axis=-1)
    counts = (sizes.key_heads, sizes.key_heads, sizes.heads)
    q, k, v = (
        mx.unflatten(part, -1, (count, -1)).swapaxes(1, 2)
        for part, count in zip(parts, counts, strict=True)
    )
    q, k = unit_length(q) * sizes.key_dim**-0.5, unit_length(k)
    shared = sizes.heads // sizes.key_heads
    if shared > 1:
        q, k = (mx.repeat(part, shared, axis=1) for part in (q, k))
    return q, k, v


def of_heads(x: mx.array) -> mx.array:
    """A number of each head, `(B, L, H)`, as `(B, H, L, 1)`."""
    return x.swapaxes(1, 2)[..., None]


def head_gates(steps: mx.array, decay_log: mx.array, step_bias: mx.array) -> mx.array:
    """The gates `f`, float32 `(B, H, L, 1)`, of steps `a`, `(B, L, H)`."""
    floats = (x.astype(mx.float32) for x in (steps, decay_log, step_bias))
    steps, rates, bias = floats
    return of_heads(mx.exp(-mx.exp(rates) * softplus(steps + bias)))


def _inputs_reference(
    qkv: mx.array,
    steps: mx.array,
    taps: mx.array,
    state: mx.array,
    decay_log: mx.array,
    step_bias: mx.array,
    sizes: HeadSizes,
) -> tuple[mx.array, ...]:
    """The definition."""
    length, heads = qkv.shape[1], sizes.heads
    window = mx.concatenate([state, qkv[..., : sizes.channels].astype(state.dtype)], axis=1)
    seen = causal_taps(window.astype(mx.float32), taps, length)
    convolved = weighted_taps(seen, taps.astype(mx.float32))
    q, k, v = convolved_heads(convolved, sizes)
    b, a = (steps[..., -2 * heads : -heads], steps[..., -heads:])
    beta = of_heads(mx.sigmoid(b.astype(mx.float32)) * sizes.max_beta)
    f = head_gates(a, decay_log, step_bias)
    return q, beta * k, v, f * k, f, window[:, length:]


def delta_rule_output(
    o: mx.array, gate: mx.array, weight: mx.array, *, eps: float, first: int = 0
) -> mx.array:
    r"""Norms what heads have read, and multiplies it by the swish of a gate.

    .. math::
        y = \frac{o}{\sqrt{\mathrm{mean}(o^2) + \epsilon}}\,w \odot \mathrm{silu}(g)

    for each head. Computed in float32.

    Source: Yang et al., arXiv 2412.06464.

    Args:
        o: `(B, H, L, V)`, any float dtype.
        gate: `g` among other columns, `(B, L, H V)` or more.
        weight: `w`, `(V,)`.
        eps: Is added to the mean square.
        first: The first column of `g`.

    Returns:
        `(B, L, H V)` in the dtype of `gate`.

    Raises:
        ValueError: The shapes do not agree.

    Example:
        >>> o, gate = mx.ones((1, 2, 3, 4)), mx.zeros((1, 3, 8))
        >>> delta_rule_output(o, gate, mx.ones(4), eps=1e-6).shape
        (1, 3, 8)
    """
    fits = o.ndim == 4 and gate.ndim == 3 and weight.shape == o.shape[3:]
    if not fits or gate.shape[:2] != (o.shape[0], o.shape[2]):
        raise ValueError(
            "[delta_rule_output] 'o', 'gate' and 'weight' must have shapes (B, H, L, V), (B, L, H V) "
            f"and (V,) but got {o.shape}, {gate.shape} and {weight.shape}."
        )
    width = o.shape[1] * o.shape[3]
    if first < 0 or first + width > gate.shape[2]:
        raise ValueError(
            f"[delta_rule_output] 'gate' must have {width} columns from 'first' on but got "
            f"{gate.shape[2]} columns and {first}."
        )
    if o.size == 0:
        return mx.zeros((*gate.shape[:2], width), gate.dtype)
    y: mx.array = _output(o, gate, weight, eps, first)
    return y


def _output_reference(
    o: mx.array, gate: mx.array, weight: mx.array, eps: float, first: int
) -> mx.array:
    """The definition."""
    o = o.swapaxes(1, 2)
    own = mx.unflatten(gate[..., first : first + o.shape[2] * o.shape[3]], -1, o.shape[2:])
    return mx.flatten(gated_rms_norm(o, own, weight, eps=eps), 2).astype(gate.dtype)


_GROUPS = 8
"""SIMD groups of a threadgroup, each of which computes one head of a position."""

_inputs_kernel = mx.fast.metal_kernel(
    name="delta_rule_inputs",
    # (B, L, C or more), (B, L, 2H or more), (C, 1, TAPS), (B, TAPS - 1, C), (H,), (H,)
    input_names=["qkv", "steps", "taps", "state", "decay_log", "step_bias"],
    # (B, H, L, K) twice, (B, H, L, V), (B, H, L, K), (B, H, L), (B, TAPS - 1, C)
    output_names=["q", "written", "v", "read", "gates", "last"],
    header=SIGMOID,
    source="""
    const int lane = thread_index_in_simdgroup;
    const int head = threadgroup_position_in_grid.x * GROUPS + simdgroup_index_in_threadgroup;
    const int position = threadgroup_position_in_grid.y;
    const int length = qkv_shape[1];
    const size_t row = threadgroup_position_in_grid.z;
    constexpr int KEY_WIDTH = KEY_HEADS * KEYS;
    constexpr int CHANNELS = 2 * KEY_WIDTH + HEADS * VALUES;
    constexpr int EACH = ((KEYS > VALUES ? KEYS : VALUES) + 31) / 32;
    // queries, keys and values
    const int kind = min(head / KEY_HEADS, 2);
    const int own = head - kind * KEY_HEADS;
    if (kind == 2 && own >= HEADS) return;
    const int dims = kind == 2 ? VALUES : KEYS;
    const int first = kind * KEY_WIDTH + own * dims;

    float values[EACH];
    float squares = 0;
    #pragma clang loop unroll(full)
    for (int n = 0; n < EACH; n++) {
        const int channel = first + lane + 32 * n;
        float sum = 0;
        if (lane + 32 * n < dims) {
            #pragma clang loop unroll(full)
            for (int tap = 0; tap < TAPS; tap++) {
                const int before = position + tap - (TAPS - 1);
                const S seen = before < 0
                    ? state[(row * (TAPS - 1) + before + TAPS - 1) * CHANNELS + channel]
                    : static_cast<S>(qkv[(row * length + before) * qkv_shape[2] + channel]);
                sum += static_cast<float>(taps[channel * TAPS + tap]) * static_cast<float>(seen);
                if (position == length - 1 && tap > 0) {
                    last[(row * (TAPS - 1) + tap - 1) * CHANNELS + channel] = seen;
                }
            }
        }
        values[n] = sum * sigmoid(sum);
        squares += values[n] * values[n];
    }
    squares = simd_sum(squares);
    if (kind == 2) {
        const size_t place = (row * HEADS + own) * length + position;
        #pragma clang loop unroll(full)
        for (int n = 0; n < EACH; n++) {
            if (lane + 32 * n < VALUES) v[place * VALUES + lane + 32 * n] = values[n];
        }
        return;
    }
    const float scale = kind == 0 ? precise::rsqrt(static_cast<float>(KEYS)) : 1.0f;
    const float factor = precise::rsqrt(squares + 1e-6f) * scale;
    for (int shared = own * (HEADS / KEY_HEADS); shared < (own + 1) * (HEADS / KEY_HEADS); shared++) {
        const size_t place = (row * HEADS + shared) * length + position;
        const size_t end = (row * length + position + 1) * steps_shape[2] - 2 * HEADS + shared;
        const float step = static_cast<float>(steps[end + HEADS])
            + static_cast<float>(step_bias[shared]);
        // softplus, whose exponential neither overflows nor loses its digits beside 1
        const float less = precise::exp(-abs(step));
        const float more = 1.0f + less;
        const float tail = more == 1.0f ? less : log(more) * less / (more - 1.0f);
        const float size = max(step, 0.0f) + tail;
        const float gate = precise::exp(-precise::exp(static_cast<float>(decay_log[shared])) * size);
        const float beta = MAX_BETA * sigmoid(static_cast<float>(steps[end]));
        if (kind == 1 && lane == 0) gates[place] = gate;
        #pragma clang loop unroll(full)
        for (int n = 0; n < EACH; n++) {
            const int dim = lane + 32 * n;
            if (dim < KEYS) {
                const float unit = values[n] * factor;
                if (kind == 0) {
                    q[place * KEYS + dim] = unit;
                } else {
                    written[place * KEYS + dim] = beta * unit;
                    read[place * KEYS + dim] = gate * unit;
                }
            }
        }
    }
    """,
)


def _inputs_in_one_launch(sizes: HeadSizes, *arrays: mx.array) -> list[mx.array]:
    qkv, steps, taps, state, decay_log, step_bias = arrays
    key_heads, heads, keys, values, max_beta = sizes
    batch, length, _ = qkv.shape
    threads = launch.SIMD_GROUP * _GROUPS
    rows = (batch, heads, length)
    return launch.launch(
        _inputs_kernel,
        inputs=[qkv, steps, taps, state, decay_log, step_bias],
        template=[
            ("S", state.dtype),
            ("KEY_HEADS", key_heads),
            ("HEADS", heads),
            ("KEYS", keys),
            ("VALUES", values),
            ("MAX_BETA", max_beta),
            ("TAPS", taps.shape[-1]),
            ("GROUPS", _GROUPS),
        ],
        grid=(-(-(2 * key_heads + heads) // _GROUPS) * threads, length, batch),
        threadgroup=(threads, 1, 1),
        output_shapes=[
            *((*rows, keys), (*rows, keys), (*rows, values), (*rows, keys), (*rows, 1)),
            state.shape,
        ],
        output_dtypes=[*[mx.float32] * 5, state.dtype],
    )


def _inputs_unsupported(*given: Any) -> str | None:
    *arrays, sizes = given
    if reason := not_floats(*arrays):
        return reason
    taps = arrays[2].shape[-1]
    if taps < 2 or 0 in arrays[0].shape:
        return "it takes two taps or more, and a position"
    names = ("qkv", "steps", "weight", "state", "decay_log", "step_bias")
    dtypes = {name: x.dtype for name, x in zip(names, arrays, strict=True)}
    return self_check.kernel_fault(
        "delta_rule_inputs",
        partial(_inputs_in_one_launch, sizes),
        _with_sizes(sizes),
        partial(_inputs_to_check, sizes, taps, list(dtypes.values())),
        **sizes._asdict(),
        taps=taps,
        **dtypes,
    )


def _with_sizes(sizes: HeadSizes) -> Any:
    def definition(
        qkv: mx.array,
        steps: mx.array,
        taps: mx.array,
        state: mx.array,
        decay_log: mx.array,
        step_bias: mx.array,
    ) -> list[mx.array]:
        return list(_inputs_reference(qkv, steps, taps, state, decay_log, step_bias, sizes))

    return definition


def _inputs_metal(*given: Any) -> tuple[mx.array, ...]:
    """One launch with a SIMD group for each head of queries, keys and values of a position."""
    *arrays, sizes = given
    run = with_reference_gradient(partial(_inputs_in_one_launch, sizes), _with_sizes(sizes))
    return tuple(run(*arrays))


def _inputs_to_check(sizes: HeadSizes, taps: int, dtypes: Sequence[mx.Dtype]) -> list[mx.array]:
    channels, heads, length = sizes.channels, sizes.heads, taps + 1

    def pattern(factor: int, *shape: int) -> mx.array:
        return ((mx.arange(math.prod(shape)) * factor % 101) / 50.0 - 1.0).reshape(shape)

    shapes = (
        (2, length, channels + 1),
        (2, length, 2 * heads + 1),
        (channels, 1, taps),
        (2, taps - 1, channels),
        (heads,),
        (heads,),
    )
    factors = (37, 53, 29, 41, 83, 71)
    given = zip(factors, shapes, dtypes, strict=True)
    return [pattern(factor, *shape).astype(dtype) for factor, shape, dtype in given]


def _inputs_examples() -> Iterator[Example]:
    for dtype, length in product(FLOATS, (1, 2)):
        sizes = HeadSizes(2, 4, 32, 32, 1)
        x = mx.zeros((1, length, sizes.channels), dtype)
        steps = mx.zeros((1, length, 8), dtype)
        taps, state = (
            mx.zeros((sizes.channels, 1, 4), dtype),
            mx.zeros((1, 3, sizes.channels), dtype),
        )
        yield Example((x, steps, taps, state, mx.zeros((4,)), mx.zeros((4,)), sizes))


_inputs = Operation(
    "delta_rule_inputs",
    _inputs_examples,
    metal=Backend(_inputs_metal, _inputs_unsupported),
    reference=_inputs_reference,
)


_output_kernel = mx.fast.metal_kernel(
    name="delta_rule_output",
    # (B, H, L, V), (B, L, H V or more), (V,), ()
    input_names=["o", "gate", "weight", "eps"],
    output_names=["out"],  # (B, L, H, V)
    header=SIGMOID,
    source="""
    const int heads = o_shape[1];
    const int length = o_shape[2];
    const int dims = o_shape[3];
    const int lane = thread_index_in_simdgroup;
    const int head = threadgroup_position_in_grid.x * GROUPS + simdgroup_index_in_threadgroup;
    const int position = threadgroup_position_in_grid.y;
    const size_t row = threadgroup_position_in_grid.z;
    if (head >= heads) return;
    const auto values = o + ((row * heads + head) * length + position) * dims;
    const auto gates = gate + (row * length + position) * gate_shape[2] + FIRST + head * dims;
    const auto outs = out + ((row * length + position) * heads + head) * dims;

    float squares = 0;
    for (int dim = lane; dim < dims; dim += 32) {
        const float value = static_cast<float>(values[dim]);
        squares += value * value;
    }
    const float factor = precise::rsqrt(simd_sum(squares) / static_cast<float>(dims) + eps);
    for (int dim = lane; dim < dims; dim += 32) {
        const float normed = static_cast<float>(values[dim]) * factor
            * static_cast<float>(weight[dim]);
        const float value = static_cast<float>(gates[dim]);
        outs[dim] = static_cast<T>(normed * value * sigmoid(value));
    }
    """,
)


def _output_in_one_launch(
    eps: float, first: int, o: mx.array, gate: mx.array, weight: mx.array
) -> mx.array:
    batch, heads, length, dims = o.shape
    threads = launch.SIMD_GROUP * _GROUPS
    (y,) = launch.launch(
        _output_kernel,
        inputs=[o, gate, weight, mx.array(eps, mx.float32)],
        template=[("T", gate.dtype), ("FIRST", first), ("GROUPS", _GROUPS)],
        grid=(-(-heads // _GROUPS) * threads, length, batch),
        threadgroup=(threads, 1, 1),
        output_shapes=[(batch, length, heads * dims)],
        output_dtypes=[gate.dtype],
    )
    return y


def _output_definition(
    eps: float, first: int, o: mx.array, gate: mx.array, weight: mx.array
) -> mx.array:
    return _output_reference(o, gate, weight, eps, first)


def _output_unsupported(
    o: mx.array, gate: mx.array, weight: mx.array, eps: float, first: int
) -> str | None:
    if reason := not_floats(o, gate, weight):
        return reason
    dtypes = {"o": o.dtype, "gate": gate.dtype, "weight": weight.dtype}
    return self_check.kernel_fault(
        "delta_rule_output",
        partial(_output_in_one_launch, eps, first),
        partial(_output_definition, eps, first),
        partial(_output_to_check, first, **dtypes),
        **dtypes,
        first=first,
    )


def _output_metal(
    o: mx.array, gate: mx.array, weight: mx.array, eps: float, first: int
) -> mx.array:
    """One launch with a SIMD group for each head of a position."""
    y: mx.array = with_reference_gradient(
        partial(_output_in_one_launch, eps, first), partial(_output_definition, eps, first)
    )(o, gate, weight)
    return y


def _output_to_check(
    first: int, o: mx.Dtype, gate: mx.Dtype, weight: mx.Dtype
) -> tuple[mx.array, ...]:
    heads, dims = _GROUPS + 1, 36
    read = (mx.arange(2 * heads * 3 * dims) * 37 % 101).reshape(2, heads, 3, dims) / 50.0 - 1.0
    count = 6 * (first + heads * dims)
    gates = (mx.arange(count) * 53 % 97).reshape(2, 3, -1) / 24.0 - 2.0
    return read.astype(o), gates.astype(gate), (mx.arange(dims) % 3 + 1.0).astype(weight)


def _output_examples() -> Iterator[Example]:
    for dtype in FLOATS:
        o, gate = mx.zeros((1, 2, 1, 32)), mx.zeros((1, 1, 64), dtype)
        yield Example((o, gate, mx.ones((32,)), 1e-6, 0))


_output = Operation(
    "delta_rule_output",
    _output_examples,
    metal=Backend(_output_metal, _output_unsupported),
    reference=_output_reference,
)
