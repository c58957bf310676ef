"""The signed Walsh-Hadamard transform of blocks, by which weights are rotated."""

from collections.abc import Iterator
from functools import partial

import mlx.core as mx

from .backend import launch, self_check
from .backend.cost import Call, Cost, work
from .backend.dispatch import Backend, Example, Operation, native_kernel
from .backend.gradient import with_reference_gradient
from .float_dtypes import FLOATS

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


_kernel = mx.fast.metal_kernel(
    name="hadamard",
    # (blocks, BLOCK), (D,), ()
    input_names=["x", "signs", "scale"],
    output_names=["out"],  # (blocks, BLOCK)
    source="""
    constexpr uint THREADS = BLOCK / EACH;
    constexpr uint GROUPS = THREADS / 32;
    const uint thread = thread_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const uint group = simdgroup_index_in_threadgroup;
    const uint block = threadgroup_position_in_grid.x;
    const auto values = x + static_cast<size_t>(block) * BLOCK;
    const auto outs = out + static_cast<size_t>(block) * BLOCK;
    const auto own_signs = signs + (block % (signs_shape[0] / BLOCK)) * BLOCK;

    float v[EACH];
    #pragma clang loop unroll(full)
    for (uint k = 0; k < EACH; k++) {
        const uint place = thread + THREADS * k;
        v[k] = static_cast<float>(values[place]);
        if (HAS_SIGNS && !INVERSE) v[k] *= own_signs[place];
    }
    #pragma clang loop unroll(full)
    for (uint step = 1; step < EACH; step *= 2) {
        #pragma clang loop unroll(full)
        for (uint k = 0; k < EACH; k++) {
            if ((k & step) == 0) {
                const float a = v[k], b = v[k + step];
                v[k] = a + b;
                v[k + step] = a - b;
            }
        }
    }
    #pragma clang loop unroll(full)
    for (uint step = 1; step < 32; step *= 2) {
        const bool is_second = (lane & step) != 0;
        #pragma clang loop unroll(full)
        for (uint k = 0; k < EACH; k++) {
            const float other = simd_shuffle_xor(v[k], step);
            v[k] = is_second ? other - v[k] : v[k] + other;
        }
    }
    if (GROUPS > 1) {
        // other threads take over, so that numbers of different SIMD groups meet in one
        threadgroup float shared[GROUPS > 1 ? BLOCK : 1];
        #pragma clang loop unroll(full)
        for (uint k = 0; k < EACH; k++) shared[thread + THREADS * k] = v[k];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        #pragma clang loop unroll(full)
        for (uint k = 0; k < EACH; k++) {
            v[k] = shared[lane + 32 * (k % GROUPS) + THREADS * (k / GROUPS + EACH / GROUPS * group)];
        }
        #pragma clang loop unroll(full)
        for (uint step = 1; step < GROUPS; step *= 2) {
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
    #pragma clang loop unroll(full)
    for (uint k = 0; k < EACH; k++) {
        const uint place = GROUPS > 1
            ? lane + 32 * (k % GROUPS) + THREADS * (k / GROUPS + EACH / GROUPS * group)
            : thread + THREADS * k;
        float y = v[k] * scale;
        if (HAS_SIGNS && INVERSE) y *= own_signs[place];
        outs[place] = static_cast<T>(y);
    }
    """,
)

_MIN_METAL_BLOCK = 64


def _metal_unsupported(
    x: mx.array, signs: mx.array | None, block: int, inverse: bool
) -> str | None:
    if block < _MIN_METAL_BLOCK:
        return f"blocks have fewer than {_MIN_METAL_BLOCK} numbers"
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
    each = min(16, block // launch.SIMD_GROUP)
    blocks, threads = x.size // block, block // each
    # without signs, something of the right size that is not read
    held = mx.ones((x.shape[-1],)) if signs is None else signs
    (y,) = launch.launch(
        _kernel,
        inputs=[x.reshape(blocks, block), held, mx.array(block**-0.5, mx.float32)],
        template=[
            ("T", x.dtype),
            ("BLOCK", block),
            ("EACH", each),
            ("HAS_SIGNS", signs is not None),
            ("INVERSE", inverse),
        ],
        grid=(threads * blocks, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(blocks, block)],
        output_dtypes=[x.dtype],
    )
    return y.reshape(x.shape)


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
