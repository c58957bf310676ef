"""Ternary projections with everything around them: gate, norms, quantisation, scales and residual.

Sources: BitNet b1.58 (Ma et al., arXiv 2402.17764), and its norm in the layer (Zhu et al., arXiv
2406.02528).
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import mlx.core as mx

from ..activations import ACTIVATIONS, Activation, activation_work
from ..backend.cost import Call, Cost, norm_work, work
from ..backend.dispatch import FLOATS, Arrays, Backend, Example, Operation, native_kernel
from ..backend.launch import EXAMPLE_ROWS
from ..rms_norm_quantize import Rounding, codes_work
from ..ternary import MOST_CODES, packed_width
from ..ternary_matmul import ternary_product, with_split_inputs
from .definition import Options as Options
from .definition import Projection as Projection
from .definition import chunked, chunked_unsupported, cuda, reference
from .metal import metal, unsupported
from .metal_groups import MAX_MATRICES


def bit_linear(
    x: mx.array,
    projections: Sequence[Projection],
    *,
    eps: float | None = None,
    rounding: Rounding = "half_even",
    quantize: bool = True,
    gate: Activation | None = None,
    norm: mx.array | None = None,
    norm_eps: float | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    r"""Projects by several ternary matrices that share one input.

    .. math::
        u = \begin{cases} a(x_{..D}) \odot x_{D..} & \text{with a gate} \\ x & \text{else} \end{cases},
        \quad z = \mathrm{RMSNorm}(u), \quad
        (q_p, s_p) = \mathrm{quantize}(\mathrm{RMSNorm}_p(z)), \quad
        y = \big[(q_p\,T_p^\top)\,m_p / s_p\big]_p + r

    A norm whose epsilon is `None` is left out, and `quantize` is as in `rms_norm_quantize`. Computed
    in float32. A backend may compute one mean square of `z` for all projections.

    Source: Ma et al., arXiv 2402.17764, and its norm in the layer, Zhu et al., arXiv 2406.02528.

    Args:
        x: `(..., D)`, or gate and up halves `(..., 2D)` with `gate`; any float dtype.
        projections: The matrices. Either all of them have a norm, or none has.
        eps: Epsilon of the projections' norms.
        rounding: How ties of the activation codes are rounded, as in `rms_norm_quantize`.
        quantize: Whether activations are quantised to 8 bits. Otherwise floats are multiplied.
        gate: The activation of the gate half, or `None` for no gate.
        norm: Scale of the norm before all projections, `(D,)`.
        norm_eps: Epsilon of that norm.
        residual: What is added to the result, `(..., N)` for N outputs in all.

    Returns:
        The results, one after the other in the last axis, in the dtype of `x`.

    Raises:
        ValueError: A matrix does not fit the input, the norms do not agree with their epsilons, or
            `D` is zero or, with `quantize`, above `2 ** 22`.

    Example:
        >>> projections = [Projection(*ternarize_packed(mx.ones((n, 8))), mx.ones(8)) for n in (3, 2)]
        >>> bit_linear(mx.ones((4, 8)), projections, eps=1e-6).shape
        (4, 5)
    """
    matrices = tuple(projections)
    # arguments by position, because names take time in each decoded token
    options = Options(eps, rounding, quantize, gate, norm, norm_eps, residual)
    if x.size == 0 or not matrices or matrices[0].weight.size == 0:
        check(x, matrices, options)
        shape = _result_shape(x, matrices)
        if 0 in shape:
            return mx.zeros(shape, x.dtype)
    result: mx.array = operation(x, matrices, options)
    return result


def check(x: mx.array, projections: tuple[Projection, ...], options: Options) -> None:
    """Refuses what `bit_linear` cannot compute, with `ValueError`."""
    eps, _, quantize, gate, norm, norm_eps, residual = options
    dims = _input_dims(x, gate, MOST_CODES if quantize else None)
    if not projections:
        raise ValueError("[bit_linear] 'projections' must hold one matrix at least but is empty.")
    width = packed_width(dims)
    for weight, _, own_norm in projections:
        shape = weight.shape
        if weight.dtype != mx.uint32 or len(shape) != 2 or shape[1] != width:
            raise ValueError(
                f"[bit_linear] 'projections' must have weights of {width} words a row, {mx.uint32}, for "
                f"{dims} inputs but got {weight.dtype} with shape {shape}."
            )
        if (own_norm is None) != (eps is None):
            raise ValueError(
                "[bit_linear] 'projections' must have a norm if 'eps' is given, else none."
            )
    if (norm is None) != (norm_eps is None):
        raise ValueError("[bit_linear] 'norm' and 'norm_eps' must be given together.")
    shape = _result_shape(x, projections)
    if residual is not None and residual.shape != shape:
        raise ValueError(
            f"[bit_linear] 'residual' must have shape {shape} but got {residual.shape}."
        )


def _result_shape(x: mx.array, projections: tuple[Projection, ...]) -> tuple[int, ...]:
    return *x.shape[:-1], sum(weight.shape[0] for weight, _, _ in projections)


def _input_dims(x: mx.array, gate: Activation | None, most: int | None) -> int:
    """The number of inputs `D`, which must be `most` at most."""
    shape = x.shape
    if not shape or shape[-1] == 0:
        raise ValueError(
            f"[bit_linear] 'x' must have one input a row at least but got shape {shape}."
        )
    if gate and shape[-1] % 2:
        raise ValueError(f"[bit_linear] 'x' must have a gate and an up half but got shape {shape}.")
    dims = shape[-1] // 2 if gate else shape[-1]
    if most is not None and dims > most:
        raise ValueError(f"[bit_linear] 'x' must have {most} inputs a row at most but got {dims}.")
    return dims


def native(x: mx.array, projections: tuple[Projection, ...], options: Options) -> mx.array:
    """One pass over the weights in C++."""
    eps, rounding, quantize, gate, norm, norm_eps, residual = options
    y: mx.array = _kernel()(
        x, projections, eps, rounding == "half_away", quantize, gate or "", norm, norm_eps, residual
    )
    return y


def _native_unsupported(
    x: mx.array, projections: tuple[Projection, ...], options: Options
) -> str | None:
    return None if x.dtype in FLOATS else f"'x' is {x.dtype}"


def _definition(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    x, norm, residual, *rest = arrays
    eps, half_away, quantize, gate, norm_eps = options
    projections = tuple(Projection(*rest[n : n + 3]) for n in range(0, len(rest), 3))
    rounding: Rounding = "half_away" if half_away else "half_even"
    given = Options(eps, rounding, quantize, gate or None, norm, norm_eps, residual)
    return [reference(x, projections, given)]


def around_product(gate: Activation | None, has_norm: bool, has_own_norm: bool) -> str:
    """The gate and norms around products of codes, for `backend.cost.Product`."""
    norms = ["norm"] * has_norm + ["own norm"] * has_own_norm
    return ", ".join([*([gate] if gate else []), *norms, "codes"])


def _cost(call: Call) -> Cost:
    x, norm, residual, *rest = call.arguments
    eps, _, has_codes, gate, norm_eps = call.options
    rows, dims = x.size // x.shape[-1], x.shape[-1] // (2 if gate else 1)
    total = work()
    if gate:
        total += activation_work(gate, rows * dims) + work(multiply=rows * dims)
    if norm_eps is not None:
        total += norm_work(rows, dims, norm is not None)
    if has_codes and eps is None:
        total += codes_work(rows, dims)
    around = None
    if has_codes:
        around = around_product(gate or None, norm_eps is not None, eps is not None)
    products = []
    for n in range(0, len(rest), 3):
        weight, scale, _ = rest[n : n + 3]
        if eps is not None:
            total += norm_work(rows, dims, True)
            total += codes_work(rows, dims) if has_codes else work()
        index: Any = call.indices[3 + n]
        own = ternary_product(rows, dims, weight, (index,), has_codes=has_codes)
        products.append(own._replace(around=around))
        # the scale of the matrix over the codes' scale, then times the sums
        total += own.work + work(multiply=rows * weight.shape[0])
        total += work(other=rows * scale.size) if has_codes else work()
    if residual is not None:
        total += work(add=residual.size)
    return Cost(total, tuple(products))


def _examples() -> Iterator[Example]:
    # arrays of fewer than 8 numbers lie in another address space of Metal
    for rows, dims, dtype in product(EXAMPLE_ROWS, (32, 4), FLOATS):
        x, norm = mx.zeros((rows, dims), dtype), mx.ones((dims,))
        weight, scale = mx.zeros((4, packed_width(dims)), mx.uint32), mx.ones((1,))
        plain = (Projection(weight, scale),)
        yield Example((x, plain, Options()), rows=rows)
        filling = Projection(mx.zeros((4096, packed_width(dims)), mx.uint32), scale)
        yield Example((x, (filling,), Options()), rows=rows)
        ragged = Projection(mx.zeros((4, packed_width(dims + 1)), mx.uint32), scale)
        yield Example((mx.zeros((rows, dims + 1), dtype), (ragged,), Options()), rows=rows)
        wide = Projection(mx.zeros((8, packed_width(dims)), mx.uint32), mx.ones((8,)))
        yield Example((x, (wide,) * 2, Options()), rows=rows)
        shared = Options(norm=norm, norm_eps=1e-6)
        for matrices in range(3, MAX_MATRICES + 1):
            yield Example((x, (wide,) * matrices, shared), rows=rows)
        yield Example((x, plain, Options(quantize=False)), rows=rows)
        normed = Options(eps=1e-6, rounding="half_away", norm=norm, norm_eps=1e-6)
        yield Example((x, (Projection(weight, scale, norm),) * 3, normed), rows=rows)
        down = (Projection(mx.zeros((4, packed_width(dims // 2)), mx.uint32), scale),)
        for gate in ACTIVATIONS:
            yield Example((x, down, Options(gate=gate, residual=x[:, :4])), rows=rows)


def _all_examples() -> Iterator[Example]:
    return with_split_inputs(_examples())


_kernel = native_kernel("bit_linear", _definition)
operation = Operation(
    "bit_linear",
    _all_examples,
    check=check,
    costs={"BitLinear": _cost},
    metal=Backend(metal, unsupported),
    cuda=cuda,
    native=Backend(native, _native_unsupported, refuses=True),
    chunked=Backend(chunked, chunked_unsupported, only_on=mx.cpu),
    reference=reference,
)
