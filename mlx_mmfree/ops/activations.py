"""Activations, by themselves and times what they gate. MLX fuses them on a GPU alone.

Those of `mlx.nn` are fused on a CPU too: MLX compiles each there and loads the result from a folder of
the temporary directory whose name anybody can take first. It also computes exponentials and the error
function on a CPU one by one, where the compiled kernels take many at once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from itertools import product
from typing import Any, Literal, get_args

import mlx.core as mx

from .backend import dispatch
from .backend.cost import Call, Cost, Work, work
from .backend.dispatch import Arrays, Backend, Example, Operation, native_kernel, not_floats, on_cpu

Activation = Literal["silu", "relu2", "gelu", "relu"]


def _fused_on_gpu(function: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
    fused = mx.compile(function, shapeless=True)

    @wraps(function)
    def call(x: mx.array) -> mx.array:
        y: mx.array = function(x) if on_cpu() else fused(x)
        return y

    return call


def relu(x: mx.array) -> mx.array:
    """`max(x, 0)`."""
    return mx.maximum(x, 0)


def squared_relu(x: mx.array) -> mx.array:
    """The square of `max(x, 0)`, in float32 because squares of float16 overflow."""
    return relu(x.astype(mx.float32)).square()


@_fused_on_gpu
def silu(x: mx.array) -> mx.array:
    """`x sigmoid(x)`."""
    return x * mx.sigmoid(x)


@_fused_on_gpu
def log_sigmoid(x: mx.array) -> mx.array:
    """The logarithm of the sigmoid, which is finite wherever `x` is."""
    return -mx.logaddexp(-x, 0)


@_fused_on_gpu
def gelu(x: mx.array) -> mx.array:
    """`x Phi(x)`, where `Phi` is the distribution function of the normal distribution."""
    return x * (1 + mx.erf(x / math.sqrt(2))) / 2


@_fused_on_gpu
def gelu_tanh(x: mx.array) -> mx.array:
    """The approximation of GELU by a hyperbolic tangent."""
    # beyond 20 the tangent is 1, while cubes of float16 overflow
    z = mx.clip(x, -20, 20)
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


@_fused_on_gpu
def elu_plus_one(x: mx.array) -> mx.array:
    """`x + 1` where `x` is positive, elsewhere `exp(x)`, which does not cancel as `elu(x) + 1` does."""
    is_positive = x > 0
    # the gradient of the branch that is not taken must not overflow either
    return mx.where(is_positive, x + 1, mx.exp(mx.where(is_positive, 0, x)))


@_fused_on_gpu
def hardswish(x: mx.array) -> mx.array:
    """`x min(max(x + 3, 0), 6) / 6`."""
    return x * mx.minimum(mx.maximum(x + 3, 0), 6) / 6


ACTIVATIONS: dict[Activation, Callable[[mx.array], mx.array]] = {
    "silu": silu,
    "relu2": squared_relu,
    "gelu": gelu,
    "relu": relu,
}
r"""The activations by their names, each a function from an array to one of its shape.

.. math::
    \mathrm{silu}(x) = x\,\sigma(x), \quad \mathrm{relu2}(x) = \max(x, 0)^2, \quad
    \mathrm{gelu}(x) = x\,\Phi(x), \quad \mathrm{relu}(x) = \max(x, 0)

Example:
    >>> ACTIVATIONS["relu2"](mx.array([-1.0, 2.0])).tolist()
    [0.0, 4.0]
"""


def activate(x: mx.array, activation: Activation) -> mx.array:
    r"""Computes an activation of each number, :math:`y = a(x)`.

    Sources: GELU (Hendrycks and Gimpel, arXiv 1606.08415), the exact one; SiLU, the same paper; the
    square of ReLU (So et al., arXiv 2109.08668).

    Args:
        x: Floats of any shape and dtype.
        activation: The name of `a`: `"silu"`, `"relu2"` (the square of ReLU), `"gelu"` or `"relu"`.

    Returns:
        The shape of `x`, in its dtype, or in float32 for `"relu2"`.

    Raises:
        ValueError: The activation is unknown.

    Example:
        >>> activate(mx.array([-1.0, 0.0, 2.0]), "relu2").tolist()
        [0.0, 0.0, 4.0]
    """
    _check(activation, "activate")
    if x.size == 0:
        return mx.zeros(x.shape, mx.float32 if activation == "relu2" else x.dtype)
    y: mx.array = _activate(x, activation)
    return y


def gated_activation(gate: mx.array, up: mx.array, activation: Activation) -> mx.array:
    r"""Multiplies values by an activation of their gate.

    .. math::
        y = a(g) \odot u

    Source: gated linear units (Shazeer, arXiv 2002.05202).

    Args:
        gate: `(..., D)`, any float dtype.
        up: `(..., D)` of the same dtype.
        activation: The name of `a`: `"silu"`, `"relu2"` (the square of ReLU), `"gelu"` or `"relu"`.

    Returns:
        `(..., D)` in the dtype of `gate`, or in float32 for `"relu2"`.

    Raises:
        ValueError: The shapes or dtypes do not agree, or the activation is unknown.

    Example:
        >>> gated_activation(mx.array([2.0, -1.0]), mx.array([3.0, 5.0]), "relu2").tolist()
        [12.0, 0.0]
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            "[gated_activation] 'gate' and 'up' must have the same shape and dtype but got "
            f"{gate.shape} of {gate.dtype} and {up.shape} of {up.dtype}."
        )
    _check(activation, "gated_activation")
    if gate.size == 0:
        return mx.zeros(gate.shape, mx.float32 if activation == "relu2" else gate.dtype)
    y: mx.array = _gated(gate, up, activation)
    return y


def gated(x: mx.array, activation: Activation) -> mx.array:
    r"""`gated_activation` of the halves of the last axis, the gate first.

    .. math::
        y = a(x_{..D}) \odot x_{D..}

    Source: gated linear units (Shazeer, arXiv 2002.05202).

    Args:
        x: `(..., 2D)`, any float dtype.
        activation: The name of the activation.

    Returns:
        `(..., D)` in the dtype of `x`, or in float32 for `"relu2"`.

    Raises:
        ValueError: The last axis is odd, or the activation is unknown.

    Example:
        >>> gated(mx.array([2.0, -1.0, 3.0, 5.0]), "relu").tolist()
        [6.0, 0.0]
    """
    if x.shape[-1] % 2:
        raise ValueError(f"[gated] 'x' must have an even last axis but got {x.shape}.")
    if x.size == 0:
        gate, up = mx.split(x, 2, axis=-1)
        return gated_activation(gate, up, activation)
    y: mx.array = _gated(x, None, activation)
    return y


def _check(activation: str, operation: str) -> None:
    names = get_args(Activation)
    if activation not in names:
        raise ValueError(
            f"[{operation}] 'activation' must be one of {', '.join(names)} but got {activation!r:.40}."
        )


_LOWEST = -80.0
"""Below it, weights are nearly too small for float32."""


def relative_weights(scores: mx.array) -> mx.array:
    r"""Weights in proportion to :math:`e^s`.

    .. math::
        e^{s-1} = \sigma / (1 - \sigma), \quad \sigma = \mathrm{silu}(s-1) / (s-1)

    Args:
        scores: Float32 of any shape, none above 0. Those below -80 weigh as much as -80, and minus
            infinity weighs nothing.

    Returns:
        float32 of the same shape.

    Example:
        >>> weights = relative_weights(mx.array([0.0, -1.0, -mx.inf]))
        >>> [round(w, 4) for w in (weights / weights[0]).tolist()]
        [1.0, 0.3679, 0.0]
    """
    shifted = mx.maximum(scores, _LOWEST) - 1
    sigmoid = activate(shifted, "silu") / shifted
    return mx.where(scores == -mx.inf, 0.0, sigmoid / (1 - sigmoid))


def _reference(x: mx.array, activation: Activation) -> mx.array:
    return ACTIVATIONS[activation](x)


def _native(x: mx.array, activation: Activation) -> mx.array:
    """One pass in C++. Its gradient is a kernel too."""
    y: mx.array = _kernel()(x, activation)
    return y


def _gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    x, cotangent = arrays
    gradients: list[mx.array] = mx.vjp(lambda x: _reference(x, options[0]), [x], [cotangent])[1]
    return gradients


def _gated_reference(gate: mx.array, up: mx.array | None, activation: Activation) -> mx.array:
    if up is None:
        gate, up = mx.split(gate, 2, axis=-1)
    return ACTIVATIONS[activation](gate) * up


@cache
def _fused_gate(activation: Activation) -> Callable[[mx.array, mx.array], mx.array]:
    """An activation of a gate times what is gated, in one launch of a GPU."""

    def gated(gate: mx.array, up: mx.array) -> mx.array:
        return _gated_reference(gate, up, activation)

    return mx.compile(gated, shapeless=True)


def _gated_on_gpu(gate: mx.array, up: mx.array | None, activation: Activation) -> mx.array:
    if up is None:
        gate, up = mx.split(gate, 2, axis=-1)
    if on_cpu():
        return _gated_reference(gate, up, activation)
    return _fused_gate(activation)(gate, up)


def _gated_native(gate: mx.array, up: mx.array | None, activation: Activation) -> mx.array:
    """One pass in C++. Its gradient is a kernel too."""
    y: mx.array = _gated_kernel()(gate, up, activation)
    return y


def _gated_gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    gate, up, cotangent = arrays
    given = [gate] if up is None else [gate, up]
    gradients: list[mx.array] = mx.vjp(
        lambda gate, up=None: _gated_reference(gate, up, options[0]), given, [cotangent]
    )[1]
    return gradients


def activation_work(activation: Activation, count: int) -> Work:
    """The cost of an activation of so many numbers."""
    each: dict[Activation, dict[str, int]] = {
        "silu": {"multiply": 1, "other": 1},
        "relu2": {"multiply": 1, "other": 1},
        "gelu": {"multiply": 1, "add": 1, "other": 3},
        "relu": {"other": 1},
    }
    return work(**{kind: number * count for kind, number in each[activation].items()})


def _cost(call: Call) -> Cost:
    return Cost(activation_work(call.options[0], call.outputs[0].size))


def _gated_cost(call: Call) -> Cost:
    count = call.outputs[0].size
    return Cost(activation_work(call.options[0], count) + work(multiply=count))


def _examples() -> Iterator[Example]:
    for activation, dtype in product(ACTIVATIONS, dispatch.FLOATS):
        yield Example((mx.zeros((1, 32), dtype), activation))


def _gated_examples() -> Iterator[Example]:
    for activation, dtype in product(ACTIVATIONS, dispatch.FLOATS):
        x = mx.zeros((1, 32), dtype)
        yield Example((x, x, activation))


_kernel = native_kernel("activate", _gradient)
_activate = Operation(
    "activate",
    _examples,
    costs={"Activate": _cost},
    metal=_reference,
    native=Backend(_native, not_floats, refuses=True),
    reference=_reference,
)
_gated_kernel = native_kernel("gated_activation", _gated_gradient)
_gated = Operation(
    "gated_activation",
    _gated_examples,
    costs={"GatedActivation": _gated_cost},
    native=Backend(_gated_native, not_floats, refuses=True),
    metal=_gated_on_gpu,
    chunked=_gated_reference,
    reference=_gated_reference,
)
