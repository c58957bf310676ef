"""Linears with what lies around them, computed together where their format allows it.

Definitions of mixers are equations between linears. What a model does faster is defined here once, for
each format of linears, which their class names as `variant`; `models.parts.fused` asks for it in blocks.

- Packed ternary linears are one operation, with a norm or a gate before them and the residual after
  them.
- Parts of ternary linears (tensor parallel) take the gate and the norms of whole tokens before
  them, and add the residual.
- Rotated codes take the rotation together with the norm, the gate, or the sum before a norm. Merged
  ones are one product.
- Floats and codes are one product where they are merged, or have many rows. On a GPU the residual
  is added in it.
- Any other module is called by itself.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .. import ops
from ..ops.activations import Activation
from ..ops.bit_linear import Options, operation
from ..ops.device import FLOATS, runs_metal_kernels
from ..ops.hadamard import hadamard_of_gate, hadamard_of_norm, hadamard_of_sum
from ..ops.linear_product import add_bias
from .arguments import check_features
from .merged import merged_parts
from .norms import is_rms_norm

Parts = tuple[mx.array, ...]
"""Results of several linears of one input, in their order; those computed together are one array."""


_fuses = ContextVar("fuses", default=True)


def fuses() -> bool:
    """Returns whether operations are computed together."""
    return _fuses.get()


@contextmanager
def plain_definitions() -> Iterator[None]:
    """A context in which models and mixers compute as they are defined, operation by operation.

    Results equal fused operations but for rounding. It is for looking at a definition and for
    comparing with it, and slower.

    Example:
        >>> from mlx_mmfree.token_mixers import MLGRU
        >>> with plain_definitions():
        ...     y, state = MLGRU(32)(mx.ones((1, 5, 32)))
        >>> y.shape
        (1, 5, 32)
    """
    token = _fuses.set(False)
    try:
        yield
    finally:
        _fuses.reset(token)


class Around(NamedTuple):
    """Operations around the last linear of a branch: gate and norm before it, and a sum after it."""

    dtype: mx.Dtype
    gate: Activation | None = None
    norm: nn.Module | None = None
    residual: mx.array | None = None


class Variant:
    """Linears of any format, one after the other.

    Attributes:
        keeps_dtype: The results have the dtype of the input, whatever the dtypes of the linears.
        takes_sum: What is before the linears can take the sum of the residual stream and a branch.
    """

    keeps_dtype: ClassVar[bool] = False
    takes_sum: ClassVar[bool] = False

    @staticmethod
    def takes(linears: Sequence[nn.Module], norm: nn.Module | None) -> bool:
        """Returns whether all these linears have the format, with the norm before them."""
        return True

    @staticmethod
    def inputs(x: mx.array, linears: Sequence[nn.Module], norm: nn.Module | None) -> Parts:
        x = x if norm is None else norm(x)
        return tuple(linear(x) for linear, _ in merged_parts(linears))

    @classmethod
    def output(cls, parts: Parts, linear: nn.Module, around: Around) -> mx.array:
        dtype, gate, norm, residual = around
        x = parts[0] if gate is None else _gated(parts, gate)
        x = x if norm is None else norm(x)
        return cls.product(x, linear, residual).astype(dtype)

    @staticmethod
    def product(x: mx.array, linear: nn.Module, residual: mx.array | None) -> mx.array:
        y: mx.array = linear(x)
        return y if residual is None else residual + y


class Floats(Variant):
    """Matrices of floats, with a bias or without."""

    @staticmethod
    def takes(linears: Sequence[nn.Module], norm: nn.Module | None) -> bool:
        return all(variant_of(linear) is Floats for linear in linears)

    @staticmethod
    def inputs(x: mx.array, linears: Sequence[nn.Module], norm: nn.Module | None) -> Parts:
        x = x if norm is None else norm(x)
        found = [linear for linear, _ in merged_parts(linears)]
        if len(found) > 1 and _are_one_product(linears, x):
            weights = [linear["weight"] for linear in linears]
            return (ops.linear_product(x, mx.concatenate(weights)),)
        return tuple(linear(x) for linear in found)

    @staticmethod
    def product(x: mx.array, linear: nn.Module, residual: mx.array | None) -> mx.array:
        weight = linear["weight"]
        is_gpu = runs_metal_kernels()
        if residual is not None and is_gpu and x.dtype == residual.dtype == weight.dtype:
            # in the same launch
            y = mx.addmm(residual, x, weight.T)
            return add_bias(y, linear["bias"]) if "bias" in linear else y
        return Variant.product(x, linear, residual)


class Rotated(Variant):
    """Rotated codes, whose norm or gate takes part in the rotation."""

    takes_sum = True

    @staticmethod
    def takes(linears: Sequence[nn.Module], norm: nn.Module | None) -> bool:
        return any(variant_of(linear) is Rotated for linear in linears)

    @staticmethod
    def inputs(x: mx.array, linears: Sequence[nn.Module], norm: nn.Module | None) -> Parts:
        found = [linear for linear, _ in merged_parts(linears)]
        rotating = [linear for linear in found if variant_of(linear) is Rotated]
        if norm is None or len(rotating) > 1 or not is_rms_norm(norm):
            return Variant.inputs(x, linears, norm)
        (one,) = rotating
        weight, signs = norm["weight"], one["signs"]
        rotated, x = hadamard_of_norm(x, weight, one.block, signs, eps=norm.eps)
        return tuple(linear.of_rotated(rotated) if linear is one else linear(x) for linear in found)

    @classmethod
    def output(cls, parts: Parts, linear: nn.Module, around: Around) -> mx.array:
        if around.gate != "silu" or around.norm is not None or len(parts) > 1:
            return super().output(parts, linear, around)
        rotated = hadamard_of_gate(parts[0], linear.block, linear["signs"])
        y = linear.of_rotated(rotated)
        return (y if around.residual is None else around.residual + y).astype(around.dtype)


class Sharded(Variant):
    """A ternary linear of which each process holds a part of the inputs."""

    @staticmethod
    def takes(linears: Sequence[nn.Module], norm: nn.Module | None) -> bool:
        return len(linears) == 1

    @classmethod
    def output(cls, parts: Parts, linear: nn.Module, around: Around) -> mx.array:
        x = parts[0]
        if len(parts) > 1 and around.gate is not None:
            x, around = _gated(parts, around.gate), around._replace(gate=None)
        y: mx.array = linear.project(
            x, gate=around.gate, norm=around.norm, residual=around.residual
        )
        return y.astype(around.dtype)


class Ternary(Variant):
    """Packed ternary linears, which one operation computes with all that lies around them."""

    keeps_dtype = True

    @staticmethod
    def takes(linears: Sequence[nn.Module], norm: nn.Module | None) -> bool:
        if norm is not None and not is_rms_norm(norm):
            return False
        for linear in linears:
            if variant_of(linear) is not Ternary or "bias" in linear:
                return False
            if linear.activations != linears[0].activations:
                return False
        return True

    @staticmethod
    def inputs(
        x: mx.array,
        linears: Sequence[nn.Module],
        norm: nn.Module | None,
        gate: Activation | None = None,
        residual: mx.array | None = None,
    ) -> Parts:
        first = linears[0]
        dims = first.input_dims if gate is None else 2 * first.input_dims
        if x.shape[-1:] != (dims,) or x.dtype not in FLOATS:
            check_features("BitLinear", x, dims)
        if x.size == 0:
            width = sum(linear.output_dims for linear in linears)
            return (mx.zeros((*x.shape[:-1], width), x.dtype),)
        eps, rounding, quantize = first.activations
        weight, norm_eps = (None, None) if norm is None else (norm["weight"], norm.eps)
        # items and the operation itself, which take least time: each token comes here often
        projections = [
            ops.Projection(
                linear["weight"],
                linear["scale"],
                None if eps is None else linear["norm"]["weight"],
            )
            for linear in linears
        ]
        options = Options(eps, rounding, quantize, gate, weight, norm_eps, residual)
        return (operation(x, tuple(projections), options),)

    @classmethod
    def output(cls, parts: Parts, linear: nn.Module, around: Around) -> mx.array:
        x = parts[0] if len(parts) == 1 else beside(parts)
        y: mx.array = cls.inputs(x, (linear,), around.norm, around.gate, around.residual)[0]
        return y.astype(around.dtype)


class Fusable:
    """A linear whose class says how it is computed with what lies around it.

    A subclass with a call of its own is called by itself, unless it says the same of itself.

    Attributes:
        variant: Computes linears of the class with what lies around them.
        is_ordinary: A call is the product with a matrix and a sum with the bias, and nothing else.
    """

    variant: ClassVar[type[Variant]] = Variant
    is_ordinary: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "__call__" in vars(cls):
            cls.variant = vars(cls).get("variant", Variant)
            cls.is_ordinary = vars(cls).get("is_ordinary", False)


def variant_of(linear: nn.Module) -> type[Variant]:
    """How it is computed with what lies around it; a module of any other class, by itself."""
    return getattr(type(linear), "variant", Variant)


def inputs(
    x: mx.array,
    linears: Sequence[nn.Module],
    norm: nn.Module | None = None,
    dtype: mx.Dtype | None = None,
) -> Parts:
    r"""Several linears of one input, `[linear(norm(x)) for linear in linears]`.

    Args:
        x: `(..., D)`.
        linears: Modules that take `(..., D)`.
        norm: Applied before them.
        dtype: That of the results; `None`: what each linear gives.

    Returns:
        The results in their order.

    Example:
        >>> [part.shape for part in inputs(mx.ones((1, 3, 8)), [nn.Linear(8, 4), nn.Linear(8, 4)])]
        [(1, 3, 4), (1, 3, 4)]
    """
    if fuses():
        return fused_inputs(x, linears, norm, dtype)
    x = x if norm is None else norm(x)
    parts: Parts = tuple(linear(x) for linear in linears)
    return parts if dtype is None else tuple(part.astype(dtype) for part in parts)


def fused_inputs(
    x: mx.array,
    linears: Sequence[nn.Module],
    norm: nn.Module | None,
    dtype: mx.Dtype | None,
) -> Parts:
    """Like `inputs`, where the caller knows that operations are computed together."""
    variant = _variant(linears, norm)
    parts = variant.inputs(x, linears, norm)
    if variant.keeps_dtype or dtype is None:
        return parts
    return tuple(part.astype(dtype) for part in parts)


def inputs_of_sum(
    x: mx.array, branch: mx.array, linears: Sequence[nn.Module], norm: nn.Module | None
) -> tuple[Parts, mx.array]:
    """Like `inputs` of a sum, and the sum. Where its norm is rotated, both are one launch."""
    one, *more = (linear for linear, _ in merged_parts(linears))
    if more or variant_of(one) is not Rotated or norm is None or not is_rms_norm(norm):
        x = x + branch
        return inputs(x, linears, norm, x.dtype), x
    signs, weight = one["signs"], norm["weight"]
    rotated, x = hadamard_of_sum(x, branch, weight, one.block, signs, eps=norm.eps)
    return (one.of_rotated(rotated).astype(x.dtype),), x


def output(parts: Parts, linear: nn.Module, around: Around) -> mx.array:
    r"""The last linear of a branch, `residual + linear(norm(gate(u) * v))`.

    Args:
        parts: What it reads; with a gate, `u` and `v`, in one array or two.
        linear: Takes `(..., D)`.
        around: What lies around it.

    Returns:
        `(..., N)`.

    Example:
        >>> x = mx.ones((1, 3, 8))
        >>> output((x,), nn.Linear(4, 8), Around(x.dtype, gate="silu", residual=x)).shape
        (1, 3, 8)
    """
    variant = _variant((linear,), around.norm) if fuses() else Variant
    return variant.output(parts, linear, around)


def finished(
    mixer: Any, parts: Parts, dtype: mx.Dtype, residual: mx.array | None = None
) -> mx.array:
    """The output of a `Mixer` for the result of its `mix`, plus `residual`.

    Args:
        mixer: The mixer.
        parts: The result; where the mixer has a `gate`, what it gates.
        dtype: That of the mixer's input.
        residual: Added.
    """
    if not mixer.output:
        return parts[0] if residual is None else residual + parts[0]
    linear, norm = mixer[mixer.output], mixer.get(mixer.before_output)
    if mixer.casts and parts[0].dtype != dtype:
        if norm is not None and dtype == mx.float16:
            # before the norm, numbers may go beyond its range
            parts, norm = (norm(parts[0]),), None
        parts = (parts[0].astype(dtype),)
    gate = mixer.gate if fuses() else None
    return output(parts, linear, Around(dtype, gate, norm, residual))


def beside(parts: Parts) -> mx.array:
    """Parts one after the other in the last axis."""
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=-1)


def widths_of(parts: Parts, widths: Sequence[int]) -> list[mx.array]:
    """Arrays that lie side by side in parts, each of one of these widths."""
    found: list[mx.array] = []
    for part in parts:
        cuts: list[int] = []
        end = 0
        while end < part.shape[-1]:
            end += widths[len(found) + len(cuts)]
            cuts.append(end)
        found += [part] if len(cuts) == 1 else mx.split(part, cuts[:-1], axis=-1)
    return found


def columns(parts: Sequence[mx.array], first: int, width: int) -> tuple[mx.array, int]:
    """The position of some columns in arrays that lie side by side.

    Returns:
        The array that holds them, several of them copied together if there must be, and the first of
        the columns in it.
    """
    ends = list(accumulate(part.shape[-1] for part in parts))
    begins = [end - part.shape[-1] for end, part in zip(ends, parts, strict=True)]
    touched = [n for n, end in enumerate(ends) if end > first and begins[n] < first + width]
    return beside(tuple(parts[n] for n in touched)), first - begins[touched[0]]


def _variant(linears: Sequence[nn.Module], norm: nn.Module | None) -> type[Variant]:
    """The format in which linears are computed together; any that only one of them has must take all."""
    for linear in linears:
        variant = variant_of(linear)
        if variant is not Variant and variant.takes(linears, norm):
            return variant
    return Variant


def _gated(parts: Parts, gate: Activation) -> mx.array:
    if len(parts) == 1:
        return ops.gated(parts[0], gate)
    values, ups = parts
    return ops.gated_activation(values, ups, gate)


def _are_one_product(linears: Sequence[nn.Module], x: mx.array) -> bool:
    """Returns whether plain matrices are merged: with more rows than columns, they are less to copy
    than the results, and the input is arranged for one product only.
    """
    if x.size <= x.shape[-1] ** 2:
        return False
    has_bias = any("bias" in linear for linear in linears)
    return not has_bias and len({linear["weight"].dtype for linear in linears}) == 1
