"""Ternary projections with everything around them: gate, norms, quantisation, scales and residual.

Sources: BitNet b1.58 (Ma et al., arXiv 2402.17764), and its norm in the layer (Zhu et al., arXiv
2406.02528).
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..activations import Activation
from ..backend.dispatch import dispatch
from ..rms_norm_quantize import Rounding
from ..ternary import MOST_CODES, packed_width


class Projection(NamedTuple):
    """One ternary matrix.

    Attributes:
        weight: Packed trits, `uint32` of shape `(N, packed_width(D))`, see `ops.ternary`.
        scale: float32, `(1,)` or one for each output, `(N,)`.
        norm: Scale of the RMSNorm of this projection, `(D,)`, or `None` for no norm.

    Example:
        >>> weight, scale = ternarize_packed(mx.array([[0.5, -0.5], [0.0, 1.0]]))
        >>> bit_linear(mx.array([2.0, 4.0]), [Projection(weight, scale)], quantize=False).tolist()
        [-1.0, 2.0]
    """

    weight: mx.array
    scale: mx.array
    norm: mx.array | None = None


class Options(NamedTuple):
    """What `bit_linear` hands on to its backends beside the input and the projections."""

    eps: float | None = None
    rounding: Rounding = "half_even"
    quantize: bool = True
    gate: Activation | None = None
    norm: mx.array | None = None
    norm_eps: float | None = None
    residual: mx.array | None = None


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

    A norm whose epsilon is `None` is left out, and `quantize` is that of `rms_norm_quantize`. Computed
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
        The results, one behind the other in the last axis, in the dtype of `x`.

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
    result: mx.array = dispatch(__name__, x, matrices, options)
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
