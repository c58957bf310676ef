r"""The arrays of a call of `bit_linear`, and its gradient on a GPU.

It takes a dense product of 16-bit numbers for each matrix. The quantiser of activations is
straight-through, and its scale cancels out. The gradient of what meets a matrix :math:`m T` is
:math:`m\,(g\,T)`, where `g` is that of the result. Trits and `g` are numbers of the dtype of `x`
already, so that nothing is rounded before the product.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import mlx.core as mx

from ..activations import Activation
from ..backend.gradient import with_reference_gradient
from ..rms_norm_quantize import Rounding, normed
from ..ternary_matmul.definition import unpacked_trits
from .definition import Options, Projection, reference, shared_input


class Form(NamedTuple):
    """The arguments of a launch that are not arrays."""

    eps: float | None
    rounding: Rounding
    quantize: bool
    gate: Activation | None
    norm_eps: float | None
    has_residual: bool

    @classmethod
    def of(cls, options: Options) -> "Form":
        return cls(*options[:4], options.norm_eps, options.residual is not None)

    def flat(
        self,
        x: mx.array,
        projections: Sequence[Projection],
        norm: mx.array | None,
        residual: mx.array | None,
    ) -> list[mx.array]:
        """The arrays of a call."""
        arrays = [x, norm, residual, *(array for parts in projections for array in parts)]
        return [array for array in arrays if array is not None]

    def nested(
        self, arrays: Sequence[mx.array]
    ) -> tuple[mx.array, tuple[Projection, ...], mx.array | None, mx.array | None]:
        """Input, projections, norm and residual of the arrays of a call."""
        x, *rest = arrays
        norm = None if self.norm_eps is None else rest.pop(0)
        residual = rest.pop(0) if self.has_residual else None
        size = 2 if self.eps is None else 3
        projections = (Projection(*rest[n : n + size]) for n in range(0, len(rest), size))
        return x, tuple(projections), norm, residual


_Run = Callable[[mx.array, tuple[Projection, ...], Options], mx.array]


def with_dense_gradient(run: Callable[..., mx.array], form: Form) -> Callable[..., Any]:
    """A function of the arrays of a call with the values of `run` and a fast gradient.

    Args:
        run: Computes the result from the arrays, in the order of `Form.flat`.
        form: The rest of the call.
    """
    return with_reference_gradient(run, partial(defined, form), partial(_gradients, form))


def defined(form: Form, *arrays: mx.array) -> mx.array:
    """The definition as a function of the arrays of a call."""
    return _called(reference, form, arrays)


def _called(run: _Run, form: Form, arrays: Sequence[mx.array]) -> mx.array:
    x, projections, norm, residual = form.nested(arrays)
    return run(x, projections, Options(*form[:4], norm, form.norm_eps, residual))


def _gradients(
    form: Form,
    inputs: Sequence[mx.array],
    cotangents: Sequence[mx.array],
    outputs: Sequence[mx.array],
) -> tuple[mx.array, ...]:
    def gradients(run: _Run, places: list[int]) -> dict[int, mx.array]:
        def function(*changed: mx.array) -> mx.array:
            arrays = list(inputs)
            for place, array in zip(places, changed, strict=True):
                arrays[place] = array
            return _called(run, form, arrays)

        found = mx.vjp(function, [inputs[place] for place in places], list(cotangents))[1]
        return dict(zip(places, found, strict=True))

    # places instead of arrays
    at: Any = form.nested(cast(Any, range(len(inputs))))
    weights, scales, _ = zip(*at[1], strict=True)
    others = [n for n in range(len(inputs)) if n not in (*weights, *scales)]
    # a scale's needs the codes, and is not computed where it is frozen, as packed matrices are
    found = gradients(_dense, others) | gradients(reference, list(scales))
    return tuple(found.get(n, x) for n, x in enumerate(inputs))


def _dense(x: mx.array, projections: tuple[Projection, ...], options: Options) -> mx.array:
    """What has the gradient of `bit_linear`, but for that of scales. Its values are not computed."""
    z = shared_input(x, options)
    results = []
    for weight, scale, own_norm in projections:
        y = normed(z, own_norm, options.eps)
        trits = unpacked_trits(weight, z.shape[-1], x.dtype)
        if scale.size == 1:
            y = y * scale
        else:
            trits = trits * scale[:, None].astype(x.dtype)
        results.append(y.astype(x.dtype) @ trits.T)
    y = mx.concatenate(results, axis=-1)
    return (y if options.residual is None else y + options.residual).astype(x.dtype)


def cuda(x: mx.array, projections: tuple[Projection, ...], options: Options) -> mx.array:
    """Plain operations, with dense products for the gradient."""
    form = Form.of(options)
    y: mx.array = _function(form)(*form.flat(x, projections, options.norm, options.residual))
    return y


@cache
def _function(form: Form) -> Callable[..., Any]:
    return with_dense_gradient(partial(defined, form), form)
