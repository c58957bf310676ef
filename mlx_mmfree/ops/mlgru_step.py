"""The step of MLGRU between its projections."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx

from .activations import activate
from .backend import launch, self_check
from .backend.compilation import fold
from .backend.cost import Call, Cost, norm_work, work
from .backend.dispatch import FLOATS, Arrays, Backend, Example, Operation, native_kernel, not_floats
from .backend.gradient import with_reference_gradient
from .backend.metal_functions import SIGMOID, SUM_OF_THREADGROUP
from .linear_scan import KERNEL_STEPS, forward_scan, launch_scan, linear_scan, type_of_index
from .norms import gated_in_one_launch, gated_rms_norm


class Options(NamedTuple):
    """The options that `mlgru_step` hands on to its backends beside gates, state and weight."""

    eps: float
    lower_bound: mx.array | None = None
    valid: mx.array | None = None
    starts: mx.array | None = None


def mlgru_step(
    gates: mx.array,
    state: mx.array,
    weight: mx.array,
    *,
    eps: float,
    lower_bound: mx.array | None = None,
    valid: mx.array | None = None,
    starts: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    r"""Runs the gated recurrence of MLGRU over one position or more and gates its output.

    .. math::
        f_t &= b + (1 - b) \odot \sigma(\hat f_t) \\
        h_t &= f_t \odot h_{t-1} + \mathrm{silu}(\hat i_t) \odot (1 - f_t) \\
        y_t &= \mathrm{RMSNorm}(g_t) \odot \mathrm{silu}(h_t)

    Computed in float32. Source: arXiv 2406.02528 sec. 3.3 as released; see `linear_scan` for the
    order of its sums.

    Args:
        gates: :math:`\hat i`, :math:`\hat f` and `g`, one after the other, `(B, L, 3E)`, any float
            dtype.
        state: :math:`h_0`, float32 `(B, E)`.
        weight: Scale of the norm of `g`, `(E,)`.
        eps: Epsilon of that norm.
        lower_bound: `b`, `(E,)`, or `None` for 0.
        valid: Booleans `(B, L)`. Where one is `False`, the state stays as it is.
        starts: Booleans `(B, L)`. Where one is `True` and the position is valid, the state before it
            counts as zero.

    Returns:
        `y`, `(B, L, E)` in the dtype of `gates`, and the last state, float32 `(B, E)`.

    Raises:
        ValueError: The shapes do not agree, or `E` is zero.

    Example:
        >>> y, state = mlgru_step(mx.ones((2, 5, 24)), mx.zeros((2, 8)), mx.ones(8), eps=1e-6)
        >>> y.shape, state.shape
        ((2, 5, 8), (2, 8))
    """
    options = Options(eps, lower_bound, valid, starts)
    if gates.size == 0:
        check(gates, state, weight, options)
        return mx.zeros((*gates.shape[:2], state.shape[1]), gates.dtype), state.astype(mx.float32)
    y, last = _operation(gates, state, weight, options)
    return y, last


def check(gates: mx.array, state: mx.array, weight: mx.array, options: Options) -> None:
    """Refuses what `mlgru_step` cannot compute, with `ValueError`."""
    fits = gates.ndim == 3 and state.shape == (gates.shape[0], gates.shape[2] // 3)
    if not fits or gates.shape[2] != 3 * state.shape[1] or state.shape[1] == 0:
        raise ValueError(
            "[mlgru_step] 'gates' and 'state' must have shapes (B, L, 3E) and (B, E) with E > 0 but "
            f"got {gates.shape} and {state.shape}."
        )


def reference(
    gates: mx.array, state: mx.array, weight: mx.array, options: Options
) -> tuple[mx.array, mx.array]:
    """The definition, in terms of the other operations."""
    eps, lower_bound, valid, starts = options
    i, f, g = mx.split(gates, 3, axis=-1)
    f = mx.sigmoid(f.astype(mx.float32))
    if lower_bound is not None:
        bound = lower_bound.astype(mx.float32)
        f = bound + (1.0 - bound) * f
    i = activate(i.astype(mx.float32), "silu") * (1.0 - f)
    if starts is not None:
        f = mx.where(starts[..., None], 0.0, f)
    if valid is not None:
        f = mx.where(valid[..., None], f, 1.0)
        i = mx.where(valid[..., None], i, 0.0)
    h, last = linear_scan(f, i, state)
    return gated_rms_norm(g, h, weight, eps=eps), last


def _chunked(
    gates: mx.array, state: mx.array, weight: mx.array, options: Options
) -> tuple[mx.array, mx.array]:
    """Few operations, on a CPU where the library's kernels cannot run.

    Each of MLX's operations costs more there than its arithmetic for one token.
    """
    eps, lower_bound, valid, starts = options
    dims = state.shape[1]
    i, f, g = mx.split(gates.astype(mx.float32), 3, axis=-1)
    # of the shape that it meets, because MLX broadcasts in an operation of its own
    one = mx.ones(f.shape)
    fold(one)
    f = mx.sigmoid(f)
    if lower_bound is not None:
        bound = mx.broadcast_to(lower_bound.astype(mx.float32), f.shape)
        free = one - bound
        fold(bound, free)
        f = bound + free * f
    i = i * mx.sigmoid(i) * (one - f)
    if starts is not None:
        f = mx.where(starts[..., None], 0.0, f)
    if valid is not None:
        f = mx.where(valid[..., None], f, 1.0)
        i = mx.where(valid[..., None], i, 0.0)
    if f.shape[1] == 1:
        h = f * state.astype(mx.float32)[:, None] + i
        last = h[:, 0]
    else:
        h, last = linear_scan(f, i, state)
    norm = mx.broadcast_to(weight.astype(mx.float32), g.shape)
    stats = (*g.shape[:-1], 1)
    share, added = mx.full(stats, 1 / dims), mx.full(stats, eps)
    fold(norm, share, added)
    mean = g.square().sum(axis=-1, keepdims=True) * share
    y = g * mx.rsqrt(mean + added) * norm * (h * mx.sigmoid(h))
    return y.astype(gates.dtype), last


def _native(
    gates: mx.array, state: mx.array, weight: mx.array, options: Options
) -> tuple[mx.array, mx.array]:
    """Gates, state and output in one pass of C++."""
    if options.starts is not None:
        raise ValueError("[mlgru_step] the compiled kernel takes no 'starts'.")
    y, last = _kernel()(gates, state, weight, options.eps, options.lower_bound, options.valid)
    return y, last


def _unsupported(
    gates: mx.array, state: mx.array, weight: mx.array, options: Options
) -> str | None:
    if gates.dtype not in FLOATS:
        return f"'gates' are {gates.dtype}"
    if options.starts is not None:
        return "'starts' are given"
    return None


def _definition(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    gates, state, weight, lower_bound, valid = arrays
    return reference(gates, state, weight, Options(options[0], lower_bound, valid))


class Variant(NamedTuple):
    """The options that select the code of a kernel, and the epsilon."""

    eps: float
    is_bounded: bool
    is_masked: bool
    has_starts: bool

    @classmethod
    def of(cls, options: Options) -> "Variant":
        eps, *arrays = options
        return cls(eps, *(array is not None for array in arrays))

    def nested(self, arrays: Sequence[mx.array]) -> tuple[list[mx.array], Options]:
        """The arguments of a call, from its arrays."""
        first, rest = list(arrays[:3]), list(arrays[3:])
        optional = [rest.pop(0) if is_given else None for is_given in self[1:]]
        return first, Options(self.eps, *optional)


MAX_THREADS = 512
CHANNELS_PER_THREAD = 4


_step_kernel = mx.fast.metal_kernel(
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
            // after the last channel the last one again
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


def _in_one_launch(variant: Variant, *arrays: mx.array) -> tuple[mx.array, mx.array]:
    """Output and last state of one position, with a threadgroup for each sequence."""
    (gates, state, weight), options = variant.nested(arrays)
    _, lower_bound, valid, _ = options
    batch, dims = state.shape
    groups = -(-dims // (launch.SIMD_GROUP * CHANNELS_PER_THREAD))
    threads = min(launch.SIMD_GROUP * groups, MAX_THREADS)
    y, last = launch.launch(
        _step_kernel,
        inputs=[
            gates.reshape(batch, 3 * dims),
            state,
            weight,
            # the state stands in for what the kernel does not read
            state if lower_bound is None else lower_bound,
            state if valid is None else valid,
            mx.array(variant.eps, mx.float32),
        ],
        template=[
            ("T", gates.dtype),
            ("BOUNDED", variant.is_bounded),
            ("MASKED", variant.is_masked),
            ("WHOLE_FOURS", dims % CHANNELS_PER_THREAD == 0),
        ],
        grid=(threads * batch, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(batch, dims), (batch, dims)],
        output_dtypes=[gates.dtype, mx.float32],
    )
    return y.reshape(batch, 1, dims), last


_scan_kernel = mx.fast.metal_kernel(
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


def _in_two_launches(
    variant: Variant, *arrays: mx.array, index_type: mx.Dtype | None = None
) -> tuple[mx.array, mx.array]:
    """Output and last state of many positions: the scan with its gates, and the output.

    A second launch gates the output, because its norm needs all channels of a position, whereas the scan
    runs some channels over all positions.
    """
    (gates, state, weight), options = variant.nested(arrays)
    batch, length, _ = gates.shape
    # the gates stand in for what the kernel does not read
    optional = [gates if array is None else array for array in options[1:]]
    states, last = launch_scan(
        _scan_kernel,
        [gates, state, *optional],
        [(batch, length, state.shape[1]), state.shape],
        index_type,
        [
            ("BOUNDED", variant.is_bounded),
            ("MASKED", variant.is_masked),
            ("STARTS", variant.has_starts),
        ],
    )
    return gated_in_one_launch(variant.eps, gates, states, weight), last


_Step = Callable[..., tuple[mx.array, mx.array]]


def _metal_unsupported(
    gates: mx.array, state: mx.array, weight: mx.array, options: Options
) -> str | None:
    _, lower_bound, valid, starts = options
    if reason := not_floats(gates, state, weight, lower_bound):
        return reason
    variant, step = Variant.of(options), _step(gates, options)
    given = {"lower_bound": lower_bound, "valid": valid, "starts": starts}
    dtypes: dict[str, Any] = {"gates": gates.dtype, "weight": weight.dtype} | {
        name: None if array is None else array.dtype for name, array in given.items()
    }
    run: Callable[..., Any] = partial(step, variant)
    is_whole = state.shape[1] % CHANNELS_PER_THREAD == 0
    selected: dict[str, Any] = {}
    if step is _in_one_launch:
        # some sequences, of more than one SIMD group of threads
        kernel, batch, length = "mlgru_step", 3, 1
        dims = 132 if is_whole else 130
    else:
        # two chunks, of which the second is longer, of more than one SIMD group of channels
        kernel, batch, length = "mlgru_scan", 2, 2 * KERNEL_STEPS + 2
        dims = 36 if is_whole else 33
        selected = {"index_type": type_of_index((*gates.shape[:2], state.shape[1]))}
        run = partial(run, **selected)
    return self_check.kernel_fault(
        kernel,
        run,
        partial(_reference, variant),
        partial(_check_inputs, batch, length, dims, **dtypes),
        **dtypes,
        is_whole=is_whole,
        **selected,
    )


def _metal(
    gates: mx.array, state: mx.array, weight: mx.array, options: Options
) -> tuple[mx.array, mx.array]:
    """One launch for one position and two for more."""
    given = [array for array in options[1:] if array is not None]
    function = _differentiable(_step(gates, options), Variant.of(options))
    y, last = function(gates, state, weight, *given)
    return y, last


def _step(gates: mx.array, options: Options) -> _Step:
    """The function that computes output and last state."""
    is_one = gates.shape[1] == 1 and options.starts is None
    return _in_one_launch if is_one else _in_two_launches


def _check_inputs(
    batch: int,
    length: int,
    dims: int,
    *,
    gates: mx.Dtype,
    weight: mx.Dtype,
    lower_bound: mx.Dtype | None,
    valid: mx.Dtype | None,
    starts: mx.Dtype | None,
) -> list[mx.array]:
    pattern = mx.arange(batch * length * 3 * dims)
    values = ((pattern * 37 % 101) / 25.0 - 2.0).reshape(batch, length, -1)
    state = ((pattern[: batch * dims] * 53 % 97) / 24.0 - 2.0).reshape(batch, dims)
    inputs = [values.astype(gates), state, (pattern[:dims] % 3 + 1.0).astype(weight)]
    numbers = pattern[: batch * length].reshape(batch, length)
    if lower_bound is not None:
        inputs.append((pattern[:dims] / dims).astype(lower_bound))
    if valid is not None:
        inputs.append((numbers % 5 != 1).astype(valid))
    if starts is not None:
        inputs.append((numbers % 7 == 3).astype(starts))
    return inputs


def _reference(variant: Variant, *arrays: mx.array) -> tuple[mx.array, mx.array]:
    (gates, state, weight), options = variant.nested(arrays)
    return reference(gates, state, weight, options)


@cache
def _differentiable(step: _Step, variant: Variant) -> Callable[..., Any]:
    return with_reference_gradient(partial(step, variant), partial(_reference, variant))


def _cost(call: Call) -> Cost:
    gates, _, _, bound, valid = call.arguments
    dims = gates.shape[-1] // 3
    rows = gates.size // gates.shape[-1]
    count = rows * dims
    # two SiLUs, the gated input, the recurrence, and the normed gate times the output
    total = work(multiply=5 * count, add=2 * count, other=3 * count) + norm_work(rows, dims, True)
    if bound is not None:
        total += work(multiply=count, add=2 * count)
    if valid is not None:
        total += work(other=2 * count)
    return Cost(total)


def _examples() -> Iterator[Example]:
    # arrays of fewer than 8 numbers lie in another address space of Metal
    for length, dims, dtype in product((1, 2), (32, 4, 33), FLOATS):
        gates, flags = mx.zeros((1, length, 3 * dims), dtype), mx.ones((1, length), mx.bool_)
        for options in (
            Options(eps=1e-6, lower_bound=mx.zeros((dims,), dtype)),
            Options(eps=1e-6, valid=flags, starts=flags),
        ):
            yield Example((gates, mx.zeros((1, dims)), mx.ones((dims,)), options))


_kernel = native_kernel("mlgru_step", _definition)
_operation = Operation(
    "mlgru_step",
    _examples,
    check=check,
    costs={"MlgruStep": _cost},
    metal=Backend(_metal, _metal_unsupported),
    native=Backend(_native, _unsupported, refuses=True),
    chunked=Backend(_chunked, only_on=mx.cpu),
    reference=reference,
)
