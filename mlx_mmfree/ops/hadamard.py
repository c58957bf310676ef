"""The signed Walsh-Hadamard transform of blocks, by which weights are rotated."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from .activations import gated
from .backend import launch, self_check
from .backend.cost import Call, Cost, work
from .backend.dispatch import FLOATS, Backend, Example, Operation, native_kernel, not_floats
from .backend.gradient import with_reference_gradient
from .backend.metal_functions import SIGMOID, SUM_OF_THREADGROUP
from .norms import rms_norm

MAX_BLOCK = 2**13


def hadamard(
    x: mx.array, block: int, signs: mx.array | None = None, *, inverse: bool = False
) -> mx.array:
    r"""Multiplies by signs and transforms each block, or undoes both.

    .. math::
        y = \frac{1}{\sqrt{n}} H_n (s \odot x), \qquad
        x = s \odot \frac{1}{\sqrt{n}} H_n\, y, \qquad
        H_1 = 1, \quad H_{2n} = \begin{pmatrix} H_n & H_n \\ H_n & -H_n \end{pmatrix}

    for each of the consecutive blocks of `n` numbers of the last axis. That is a rotation: lengths and
    products of rows stay. Computed in float32.

    Source: Sylvester's construction; as a rotation of weights, QuIP# (Tseng et al., arXiv 2402.04396).

    Args:
        x: `(..., D)`, any float dtype.
        block: `n`, a power of two from 2 to 8192 that divides `D`.
        signs: `s`, float32 `(D,)`, each 1 or -1; `None`: all are 1.
        inverse: The second formula instead of the first.

    Returns:
        `(..., D)` in the dtype of `x`.

    Raises:
        ValueError: The block is no power of two within its bounds, or a shape or dtype does not fit.

    Example:
        >>> y = hadamard(mx.array([1.0, 2.0, 3.0, 4.0]), 4, mx.array([1.0, -1.0, 1.0, 1.0]))
        >>> y.tolist()
        [3.0, 1.0, -4.0, 2.0]
    """
    if type(block) is not int or not 2 <= block <= MAX_BLOCK or block & (block - 1):
        raise ValueError(
            f"[hadamard] 'block' must be a power of two from 2 to {MAX_BLOCK} but got {block!r:.40}."
        )
    if x.ndim < 1 or x.shape[-1] % block or x.dtype not in FLOATS:
        raise ValueError(
            f"[hadamard] 'x' must be floats (..., D), D a multiple of {block}, but got {x.dtype} with "
            f"shape {x.shape}."
        )
    if signs is not None and (signs.shape != x.shape[-1:] or signs.dtype != mx.float32):
        raise ValueError(
            f"[hadamard] 'signs' must be float32 of shape {x.shape[-1:]} but got {signs.dtype} with "
            f"shape {signs.shape}."
        )
    if x.size == 0:
        return x
    y: mx.array = _operation(x, signs, block, inverse)
    return y


def _reference(x: mx.array, signs: mx.array | None, block: int, inverse: bool) -> mx.array:
    """The definition, step by step over blocks of twice the size."""
    y = x.astype(mx.float32)
    if signs is not None and not inverse:
        y = y * signs
    size = 1
    while size < block:
        a, b = mx.split(y.reshape(*x.shape[:-1], -1, 2, size), 2, axis=-2)
        y = mx.concatenate([a + b, a - b], axis=-2).reshape(x.shape)
        size *= 2
    y = y * block**-0.5
    if signs is not None and inverse:
        y = y * signs
    return y.astype(x.dtype)


# A thread transforms numbers in registers, first neighbours and then such as lie further apart, which
# threads exchange in threadgroup memory. Each writes to the indices that it has read from.
_SOURCE = """
    constexpr uint THREADS = BLOCK / EACH;
    constexpr uint GROUPS = THREADS / 32;
    const uint index = thread_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const uint group = simdgroup_index_in_threadgroup;
    const uint block = threadgroup_position_in_grid.x;
    const uint dims = signs_shape[0];
    const uint first = block % (dims / BLOCK) * BLOCK + EACH * index;
    const size_t row = block / (dims / BLOCK);
    const auto outs = out + static_cast<size_t>(block) * BLOCK;
    threadgroup float shared[BLOCK];
    <begin>

    float v[EACH];
    #pragma clang loop unroll(full)
    for (uint k = 0; k < EACH; k++) {
        <value>
        if (HAS_SIGNS && !INVERSE) v[k] *= (signs + first)[k];
    }
    uint place = EACH * index;
    uint stride = 1;
    #pragma clang loop unroll(full)
    for (uint done = 1; done < BLOCK; done *= EACH) {
        if (done > 1) {
            #pragma clang loop unroll(full)
            for (uint k = 0; k < EACH; k++) shared[place + stride * k] = v[k];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            // in the end some numbers have met already
            stride = min(done, THREADS);
            place = index / stride * (stride * EACH) + index % stride;
            #pragma clang loop unroll(full)
            for (uint k = 0; k < EACH; k++) v[k] = shared[place + stride * k];
        }
        #pragma clang loop unroll(full)
        for (uint step = done / stride; step < EACH; step *= 2) {
            #pragma clang loop unroll(full)
            for (uint k = 0; k < EACH; k++) {
                if ((k & step) == 0) {
                    const float a = v[k], b = v[k + step];
                    v[k] = a + b;
                    v[k + step] = a - b;
                }
            }
        }
    }
    const uint column = block % (dims / BLOCK) * BLOCK + place;
    #pragma clang loop unroll(full)
    for (uint k = 0; k < EACH; k++) {
        float y = v[k] * scale;
        if (HAS_SIGNS && INVERSE) y *= signs[column + stride * k];
        outs[place + stride * k] = static_cast<T>(y);
    }
"""

_SQUARES = """
    const auto numbers = x + row * dims;
    <begin>
    float squares = 0;
    for (uint start = 4 * index; start < dims; start += 4 * THREADS) {
        #pragma clang loop unroll(full)
        for (uint k = 0; k < 4; k++) {
            const float number = <number>;
            squares += number * number;
        }
    }
    // the largest block takes all memory of a threadgroup
    squares = sum_of_threadgroup(squares, shared, lane, group, GROUPS);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float factor = precise::rsqrt(squares / static_cast<float>(dims) + eps);
"""

_NORMED = """
        const float number = static_cast<float>((numbers + first)[k]) * factor
            * static_cast<float>((weight + first)[k]);
        (normed + row * dims + first)[k] = static_cast<T>(number);
        v[k] = number;
"""

_SUM = """
        const float number = <number>;
        (summed + row * dims + first)[k] = static_cast<T>(number);
        v[k] = number * factor * static_cast<float>((weight + first)[k]);
"""


def _sum_from(start: str) -> str:
    """Sum `k` of those from `start` on in the row, as it is stored."""
    terms = (f"static_cast<float>(({each} + {start})[k])" for each in ("numbers", "branches"))
    return f"static_cast<float>(static_cast<T>({' + '.join(terms)}))"


def _kernel_of(
    name: str, given: Sequence[str], begin: str, value: str, others: Sequence[str] = ()
) -> Any:
    """The transform of values that the text `value` computes, as `v[k]` for a `place` of the block."""
    return mx.fast.metal_kernel(
        name=name,
        # (rows, D), (D,), (), then the arrays of `given`
        input_names=["x", "signs", "scale", *given],
        output_names=["out", *others],  # (rows, D)
        header=SIGMOID + SUM_OF_THREADGROUP,
        source=_SOURCE.replace("<begin>", begin).replace("<value>", value),
    )


_kernel = _kernel_of("hadamard", (), "", "v[k] = static_cast<float>((x + row * dims + first)[k]);")
_norm_kernel = _kernel_of(
    "hadamard_of_norm",
    ("weight", "eps"),
    _SQUARES.replace("<begin>", "").replace("<number>", "static_cast<float>((numbers + start)[k])"),
    _NORMED,
    ("normed",),
)
_sum_kernel = _kernel_of(
    "hadamard_of_sum",
    ("weight", "eps", "branch"),
    _SQUARES.replace("<begin>", "const auto branches = branch + row * dims;").replace(
        "<number>", _sum_from("start")
    ),
    _SUM.replace("<number>", _sum_from("first")),
    ("summed",),
)
_gate_kernel = _kernel_of(
    "hadamard_of_gate",
    (),
    "const auto gates = x + 2 * row * dims + first;",
    """
        const float gate = static_cast<float>(gates[k]);
        v[k] = gate * sigmoid(gate) * static_cast<float>((gates + dims)[k]);
    """,
)

_MIN_METAL_BLOCK = 64


def _too_small(block: int) -> str | None:
    return (
        None if block >= _MIN_METAL_BLOCK else f"blocks have fewer than {_MIN_METAL_BLOCK} numbers"
    )


def _metal_unsupported(
    x: mx.array, signs: mx.array | None, block: int, inverse: bool
) -> str | None:
    if reason := _too_small(block):
        return reason
    return self_check.kernel_fault(
        "hadamard",
        partial(_in_one_launch, block=block, inverse=inverse),
        partial(_reference, block=block, inverse=inverse),
        partial(_check_inputs, x.dtype, signs is not None, block),
        dtype=x.dtype,
        has_signs=signs is not None,
        block=block,
        inverse=inverse,
    )


def _check_inputs(dtype: mx.Dtype, has_signs: bool, block: int) -> tuple[mx.array, mx.array | None]:
    pattern = mx.arange(4 * block)
    x = ((pattern * 37 % 101) / 50.0 - 1.0).reshape(2, 2 * block).astype(dtype)
    signs = 1.0 - 2.0 * (pattern[: 2 * block] * 53 % 97 % 2).astype(mx.float32)
    return x, signs if has_signs else None


def _in_one_launch(x: mx.array, signs: mx.array | None, *, block: int, inverse: bool) -> mx.array:
    """One launch with a threadgroup for each block."""
    # without signs, something of the right size that is not read
    given = mx.ones((x.shape[-1],)) if signs is None else signs
    (y,) = _launch(_kernel, x, given, block, signs is not None, inverse)
    return y


def _launch(
    kernel: Any,
    x: mx.array,
    signs: mx.array,
    block: int,
    has_signs: bool = True,
    inverse: bool = False,
    others: Sequence[mx.array] = (),
) -> list[mx.array]:
    each, dims = min(16, block // launch.SIMD_GROUP), signs.shape[0]
    shape = (*x.shape[:-1], dims)
    blocks, threads = math.prod(shape) // block, block // each
    count = 2 if others else 1
    return launch.launch(
        kernel,
        inputs=[x, signs, mx.array(block**-0.5, mx.float32), *others],
        template=[
            ("T", x.dtype),
            ("BLOCK", block),
            ("EACH", each),
            ("HAS_SIGNS", has_signs),
            ("INVERSE", inverse),
        ],
        grid=(threads * blocks, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape] * count,
        output_dtypes=[x.dtype] * count,
    )


def _metal(x: mx.array, signs: mx.array | None, block: int, inverse: bool) -> mx.array:
    run = partial(_in_one_launch, block=block, inverse=inverse)
    definition = partial(_reference, block=block, inverse=inverse)
    if signs is None:
        run, definition = partial(run, signs=None), partial(definition, signs=None)
        y: mx.array = with_reference_gradient(run, definition)(x)
    else:
        y = with_reference_gradient(run, definition)(x, signs)
    return y


def _native(x: mx.array, signs: mx.array | None, block: int, inverse: bool) -> mx.array:
    """One pass in C++. Its gradient is the other of the two formulas."""
    y: mx.array = _load()(x, signs, block, inverse)
    return y


def _cost(call: Call) -> Cost:
    x, signs = call.arguments
    steps = call.options[0].bit_length() - 1
    multiplied = x.size if signs is None else 2 * x.size
    return Cost(work(add=steps * x.size, multiply=multiplied))


def _examples() -> Iterator[Example]:
    for dtype in FLOATS:
        for block in (64, 512, 1024):
            x = mx.zeros((1, block), dtype)
            yield Example((x, mx.ones((block,)), block, False))
        yield Example((x, None, 512, True))


_load = native_kernel("hadamard")
_operation = Operation(
    "hadamard",
    _examples,
    costs={"Hadamard": _cost},
    metal=Backend(_metal, _metal_unsupported),
    native=Backend(_native, refuses=True),
    reference=_reference,
)


def hadamard_of_norm(
    x: mx.array, weight: mx.array, block: int, signs: mx.array, *, eps: float
) -> tuple[mx.array, mx.array]:
    r"""`hadamard` of an RMSNorm, and the norm itself.

    .. math::
        z = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}}\,w, \qquad
        y = \frac{1}{\sqrt{n}} H_n (s \odot z)

    Args:
        x: `(..., D)`, any float dtype.
        weight: `w`, `(D,)`.
        block: `n`, as of `hadamard`.
        signs: `s`, float32 `(D,)`.
        eps: Epsilon of the norm.

    Returns:
        `y` and `z`, `(..., D)` in the dtype of `x`.

    Raises:
        ValueError: A shape does not fit.

    Example:
        >>> y, z = hadamard_of_norm(mx.array([3.0, 3.0]), mx.ones(2), 2, mx.ones(2), eps=0.0)
        >>> [round(n, 4) for n in (y + z).tolist()]
        [2.4142, 1.0]
    """
    if weight.shape != x.shape[-1:] or signs.shape != x.shape[-1:]:
        raise ValueError(
            f"[hadamard_of_norm] 'weight' and 'signs' must have shape {x.shape[-1:]} but got "
            f"{weight.shape} and {signs.shape}."
        )
    if x.size == 0:
        return x, x
    y, z = _of_norm(x, weight, signs, block, eps)
    return y, z


def _norm_reference(
    x: mx.array, weight: mx.array, signs: mx.array, block: int, eps: float
) -> list[mx.array]:
    """The definition, in terms of the other operations."""
    normed = rms_norm(x, weight, eps=eps)
    return [hadamard(normed, block, signs), normed]


def hadamard_of_sum(
    x: mx.array, branch: mx.array, weight: mx.array, block: int, signs: mx.array, *, eps: float
) -> tuple[mx.array, mx.array]:
    r"""`hadamard` of the RMSNorm of a sum, and the sum itself.

    .. math::
        u = x + b, \qquad z = \frac{u}{\sqrt{\mathrm{mean}(u^2) + \epsilon}}\,w, \qquad
        y = \frac{1}{\sqrt{n}} H_n (s \odot z)

    Args:
        x: `(..., D)`, any float dtype.
        branch: `b`, of the shape and dtype of `x`.
        weight: `w`, `(D,)`.
        block: `n`, as of `hadamard`.
        signs: `s`, float32 `(D,)`.
        eps: Epsilon of the norm.

    Returns:
        `y` and `u`, `(..., D)` in the dtype of `x`.

    Raises:
        ValueError: A shape or dtype does not fit.

    Example:
        >>> x, ones = mx.array([1.0, 2.0]), mx.ones(2)
        >>> y, u = hadamard_of_sum(x, x, ones, 2, ones, eps=0.0)
        >>> [round(n, 4) for n in y.tolist()], u.tolist()
        ([1.3416, -0.4472], [2.0, 4.0])
    """
    if weight.shape != x.shape[-1:] or signs.shape != x.shape[-1:]:
        raise ValueError(
            f"[hadamard_of_sum] 'weight' and 'signs' must have shape {x.shape[-1:]} but got "
            f"{weight.shape} and {signs.shape}."
        )
    if branch.shape != x.shape or branch.dtype != x.dtype:
        raise ValueError(
            f"[hadamard_of_sum] 'branch' must be {x.dtype} of shape {x.shape} but got {branch.dtype} "
            f"with shape {branch.shape}."
        )
    if x.size == 0:
        return x, x
    y, u = _of_sum(x, branch, weight, signs, block, eps)
    return y, u


def _sum_reference(
    x: mx.array, branch: mx.array, weight: mx.array, signs: mx.array, block: int, eps: float
) -> list[mx.array]:
    """The definition, in terms of the other operations."""
    summed = x + branch
    return [hadamard(rms_norm(summed, weight, eps=eps), block, signs), summed]


def hadamard_of_gate(x: mx.array, block: int, signs: mx.array) -> mx.array:
    r"""`hadamard` of what a swish gates, :math:`\mathrm{silu}(x_{..D}) \odot x_{D..}`.

    .. math::
        y = \frac{1}{\sqrt{n}} H_n (s \odot \mathrm{silu}(x_{..D}) \odot x_{D..})

    Args:
        x: `(..., 2D)`, any float dtype.
        block: `n`, as of `hadamard`.
        signs: `s`, float32 `(D,)`.

    Returns:
        `(..., D)` in the dtype of `x`.

    Raises:
        ValueError: A shape does not fit.

    Example:
        >>> y = hadamard_of_gate(mx.array([2.0, 2.0, 1.0, 1.0]), 2, mx.ones(2))
        >>> [round(n, 4) for n in y.tolist()]
        [2.4913, 0.0]
    """
    if x.shape[-1] != 2 * signs.shape[0]:
        raise ValueError(
            f"[hadamard_of_gate] 'x' must have {2 * signs.shape[0]} numbers in its last axis but got "
            f"shape {x.shape}."
        )
    if x.size == 0:
        return x[..., : signs.shape[0]]
    y: mx.array = _of_gate(x, signs, block)
    return y


def _gate_reference(x: mx.array, signs: mx.array, block: int) -> mx.array:
    """The definition, in terms of the other operations."""
    return hadamard(gated(x, "silu"), block, signs)


def _norm_in_one_launch(
    block: int, eps: float, x: mx.array, weight: mx.array, signs: mx.array
) -> list[mx.array]:
    others = [weight, mx.array(eps, mx.float32)]
    return _launch(_norm_kernel, x, signs, block, others=others)


def _norm_to_check(dtype: mx.Dtype, weight: mx.Dtype, block: int) -> list[mx.array]:
    x, signs = _check_inputs(dtype, True, block)
    assert signs is not None
    return [x, (mx.arange(2 * block) % 3 + 1.0).astype(weight), signs]


def _sum_in_one_launch(
    block: int, eps: float, x: mx.array, branch: mx.array, weight: mx.array, signs: mx.array
) -> list[mx.array]:
    others = [weight, mx.array(eps, mx.float32), branch]
    return _launch(_sum_kernel, x, signs, block, others=others)


def _sum_to_check(dtype: mx.Dtype, weight: mx.Dtype, block: int) -> list[mx.array]:
    x, *others = _norm_to_check(dtype, weight, block)
    return [x, x[..., ::-1] * 3.0, *others]


def _gate_in_one_launch(block: int, x: mx.array, signs: mx.array) -> mx.array:
    (y,) = _launch(_gate_kernel, x, signs, block)
    return y


def _gate_to_check(dtype: mx.Dtype, block: int) -> list[mx.array]:
    x, signs = _check_inputs(dtype, True, block)
    assert signs is not None
    return [mx.concatenate([x, x[..., ::-1]], axis=-1), signs]


def _norm_examples() -> Iterator[Example]:
    for dtype in FLOATS:
        for block in (512, 1024):
            x, ones = mx.zeros((1, block), dtype), mx.ones((block,))
            yield Example((x, ones, ones, block, 1e-6))


def _sum_examples() -> Iterator[Example]:
    for example in _norm_examples():
        x, *others = example.args
        yield Example((x, x, *others))


def _gate_examples() -> Iterator[Example]:
    for dtype in FLOATS:
        for block in (512, 1024):
            yield Example((mx.zeros((1, 2 * block), dtype), mx.ones((block,)), block))


def _in_launch(
    name: str,
    run: Callable[..., Any],
    reference: Callable[..., Any],
    to_check: Callable[..., Sequence[mx.array]],
    count: int,
) -> Backend:
    """One launch, in which each block's threadgroup reads all that it needs of its row.

    Args:
        name: The operation. It takes arrays, then the numbers of a block and perhaps an epsilon.
        run: Takes these options, then the arrays.
        reference: The definition.
        to_check: Makes arrays from the dtypes of the floats that the kernel depends on, and the numbers
            of a block.
        count: The arrays. The last are the signs, and before them comes the weight of a norm if there
            are three at least.
    """

    def with_options(options: Sequence[Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return partial(run, *options), lambda *arrays: reference(*arrays, *options)

    def metal(*arguments: Any) -> Any:
        return with_reference_gradient(*with_options(arguments[count:]))(*arguments[:count])

    def unsupported(*arguments: Any) -> str | None:
        *floats, _ = arguments[:count]
        block = arguments[count]
        if reason := not_floats(*floats) or _too_small(block):
            return reason
        dtypes = {"dtype": floats[0].dtype}
        if len(floats) > 1:
            dtypes["weight"] = floats[-1].dtype
        inputs = partial(to_check, *dtypes.values(), block)
        functions = with_options(arguments[count:])
        return self_check.kernel_fault(name, *functions, inputs, **dtypes, block=block)

    return Backend(metal, unsupported)


_of_norm = Operation(
    "hadamard_of_norm",
    _norm_examples,
    metal=_in_launch("hadamard_of_norm", _norm_in_one_launch, _norm_reference, _norm_to_check, 3),
    reference=_norm_reference,
)
_of_sum = Operation(
    "hadamard_of_sum",
    _sum_examples,
    metal=_in_launch("hadamard_of_sum", _sum_in_one_launch, _sum_reference, _sum_to_check, 4),
    reference=_sum_reference,
)
_of_gate = Operation(
    "hadamard_of_gate",
    _gate_examples,
    metal=_in_launch("hadamard_of_gate", _gate_in_one_launch, _gate_reference, _gate_to_check, 2),
    reference=_gate_reference,
)
