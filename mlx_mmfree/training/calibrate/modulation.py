r"""Linears whose ternary format is learned: in each group of inputs a shift, a scale and a threshold.

Source: CAT-Q (arXiv 2606.26650) for the modulation and for the function that sharpens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from ...layers.dense import QuantizedLinear
from ...layers.matrix import Matrix
from ...ops import long_mean, pack_ternary
from ...ops.ternary import straight_through

Start = Literal["kept", "mean"]
"""How a group begins: with a threshold of 0.7 and the mean of what is kept, or with all at zero."""

BITS = 2
_EPS, _SMALLEST, _MARGIN = 1e-6, 2.0**-14, 1e-2
_CHUNK = 2**21
"""The most weights that are made ternary at a time, in whole rows."""

_BY_ROW = ("shift", "scale", "threshold", "weight", "up")
_ARRAYS = (*_BY_ROW, "unit", "down")


@dataclass(frozen=True)
class Modulation:
    """The learned parameters of each linear.

    Attributes:
        group_size: Inputs of a row that share a scale.
        rank: The rank of the change of the weight; `None` learns the whole weight, 0 nothing of it.
        start: How each group begins.
        scale_dtype: The dtype of the scales of the packed format.
    """

    group_size: int = 128
    rank: int | None = None
    start: Start = "kept"
    scale_dtype: mx.Dtype = mx.float16


class ModulatedLinear(Matrix, nn.Module):
    r"""A linear layer with float activations, whose weight is made ternary in a way that is learned.

    Of the weights :math:`w` of a group, and its numbers :math:`p`,

    .. math::
        m_0 &= \mathrm{mean}(w), & a_0 &= \mathrm{mean}\,|w - m_0| + 10^{-6} \\
        m &= m_0 + (2 \sigma(p_m) - 1)\,a_0, & a &= 2 \sigma(p_a)\,a_0, \qquad d = \sigma(p_d) \\
        v &= (w - m) / a, & w' &= a\,t

    with the trits :math:`t = \mathrm{clip}(\mathrm{round}(v / 2d), -1, 1)`, whose gradient is
    straight-through, or before they are hard, with a sharpness :math:`s`,

    .. math::
        t = \frac{\tanh(s (v - d)) + \tanh(s (v + d))}{2 \tanh(s)}

    The weight is kept in units of its root mean square, so that one learning rate suits all matrices.
    Its change is added to it: :math:`w = W + B A`.

    Args:
        linear: Gives the weight `(N, D)` and the bias.
        modulation: What is learned.
        key: Of the random :math:`A`.

    Parameters:
        `shift`, `scale` and `threshold` (:math:`p_m`, :math:`p_a`, :math:`p_d`) `(N, D / G)`, `weight`,
        `unit` `()`; with a rank `down` (:math:`A`) `(R, D)` and `up` (:math:`B`) `(N, R)`.

    Shape:
        Input `(..., D)`, result `(..., N)`.
    """

    holds_floats = True
    is_ternary = True

    def __init__(self, linear: nn.Module, modulation: Modulation, key: mx.array):
        super().__init__()
        weight: mx.array = linear.weight.astype(mx.float32)
        self.unit = mx.sqrt(long_mean(weight.square())) + _EPS
        units = weight / self.unit
        self.shift, self.scale, self.threshold = _start(
            units.reshape(weight.shape[0], -1, modulation.group_size), modulation.start
        )
        rank = modulation.rank
        # what is not trained keeps the dtype of its file
        self.weight = units if rank is None else units.astype(linear.weight.dtype)
        if rank:
            self.down = mx.random.normal((rank, weight.shape[1]), key=key) / math.sqrt(rank)
            self.up = mx.zeros((weight.shape[0], rank))
        if "bias" in linear:
            self.bias = linear.bias
        self._modulation = modulation
        self._sharpness: mx.array | None = None

    def sharpen(self, sharpness: mx.array | None) -> None:
        """Sets the sharpness of the trits, float32 `()`; `None` makes them hard."""
        self._sharpness = sharpness

    @property
    def learned(self) -> list[str]:
        """The names of the parameters that are learned."""
        rank = self._modulation.rank
        own = ["weight"] if rank is None else ["down", "up"] if rank else []
        return ["shift", "scale", "threshold", *own]

    @property
    def input_dims(self) -> int:
        return int(self.weight.shape[1])

    @property
    def output_dims(self) -> int:
        return int(self.weight.shape[0])

    def _arrays(self) -> dict[str, mx.array]:
        return {name: self[name] for name in _ARRAYS if name in self}

    def _groups(self, arrays: dict[str, mx.array]) -> tuple[mx.array, mx.array, mx.array]:
        """:math:`v` of each weight, `(N, D / G, G)`, and :math:`a` and :math:`d` of each group."""
        units = arrays["weight"].astype(mx.float32)
        if "up" in arrays:
            units = units + arrays["up"] @ arrays["down"]
        groups = units.reshape(units.shape[0], -1, self._modulation.group_size)
        mean, size = _moments(groups)
        shift, scale, threshold = (
            mx.sigmoid(arrays[name])[..., None] for name in ("shift", "scale", "threshold")
        )
        size_of = 2 * scale * size
        return (groups - mean - (2 * shift - 1) * size) / size_of, size_of, threshold

    def _ternary(self, arrays: dict[str, mx.array]) -> mx.array:
        """The matrix with hard trits and scales as they are written, float32 `(N, D)`."""
        v, size, threshold = self._groups(arrays)
        quotient = v / (2 * threshold)
        trits = mx.clip(straight_through(mx.round(quotient), quotient), -1, 1)
        scales = size * arrays["unit"]
        written = self._written(scales).astype(mx.float32)
        return (straight_through(written, scales) * trits).reshape(arrays["weight"].shape)

    def _softened(self, arrays: dict[str, mx.array], sharpness: mx.array) -> mx.array:
        """The matrix before its trits are hard, float32 `(N, D)`."""
        v, size, threshold = self._groups(arrays)
        sides = mx.tanh(sharpness * (v - threshold)) + mx.tanh(sharpness * (v + threshold))
        trits = sides / (2 * mx.tanh(sharpness))
        return (size * arrays["unit"] * trits).reshape(arrays["weight"].shape)

    def _written(self, scales: mx.array) -> mx.array:
        return mx.clip(scales, _SMALLEST, 65504.0).astype(self._modulation.scale_dtype)

    def current(self) -> mx.array:
        """The matrix that it computes with now, float32 `(N, D)`."""
        if self._sharpness is None:
            return self._ternary(self._arrays())
        return self._softened(self._arrays(), self._sharpness)

    def packed_trits(self) -> mx.array:
        v, _, threshold = self._groups(self._arrays())
        trits = mx.clip(mx.round(v / (2 * threshold)), -1, 1)
        return pack_ternary(trits.reshape(self.weight.shape))

    def to_packed(self) -> nn.Module:
        """The same layer with codes of 2 bits, scales and biases."""
        has_bias, group_size = "bias" in self, self._modulation.group_size
        packed = QuantizedLinear(self.input_dims, self.output_dims, has_bias, group_size, BITS)
        _, size, _ = self._groups(self._arrays())
        packed.scales = self._written(size[..., 0] * self.unit)
        packed.weight, packed.biases = self.packed_trits(), -packed.scales
        if has_bias:
            packed.bias = self.bias
        return packed

    def multiply(self, x: mx.array) -> mx.array:
        return x.astype(mx.float32) @ self.current().T

    def gathered(
        self, x: mx.array, indices: mx.array, count: int, starts: mx.array | None = None
    ) -> mx.array:
        weight = self.current().reshape(count, -1, self.input_dims).swapaxes(1, 2)
        rows, is_sorted = x.astype(mx.float32)[..., None, :], starts is not None
        y = mx.gather_mm(rows, weight, rhs_indices=indices, sorted_indices=is_sorted)
        return y[..., 0, :]

    def __call__(self, x: mx.array) -> mx.array:
        sharpness = [] if self._sharpness is None else [self._sharpness]
        weight = self._softened if sharpness else self._ternary
        y = recomputed_product(weight, x, self._arrays(), sharpness)
        return (y + self.bias).astype(x.dtype) if "bias" in self else y


def recomputed_product(
    weight: Callable[..., mx.array],
    x: mx.array,
    arrays: dict[str, mx.array],
    constants: list[mx.array],
) -> mx.array:
    """`x W^T` in the dtype of `x`, for a matrix that is made some rows at a time.

    It is made again for the backward pass. A whole matrix and what it is made of would take several
    times the memory of the weights that they come from.

    Args:
        weight: Makes the matrix, or some of its rows, of `arrays` and `constants`.
        x: `(..., D)`.
        arrays: What gets gradients; those in `_BY_ROW` have a row for each row of the matrix.
        constants: What gets none.
    """
    count, dims = arrays["weight"].shape
    size = max(1, _CHUNK // dims)
    chunks = [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def forward(x: mx.array, arrays: Any, constants: Any) -> mx.array:
        y: list[mx.array] = []
        for chunk in chunks:
            matrix = weight(_rows(arrays, chunk, (y or [x])[-1]), *constants)
            y.append(x @ matrix.astype(x.dtype).T)
        return mx.concatenate(y, axis=-1)

    def backward(primals: Any, cotangent: mx.array, output: mx.array) -> Any:
        x, arrays, constants = primals
        names = list(arrays)
        rows, inputs = cotangent.reshape(-1, count), x.reshape(-1, dims)
        of_x: mx.array | None = None
        found: dict[str, list[mx.array]] = {name: [] for name in names if name in _BY_ROW}
        sums: dict[str, mx.array] = {}

        def made(*given: mx.array) -> mx.array:
            matrix: mx.array = weight(dict(zip(names, given, strict=True)), *constants)
            return matrix

        for chunk in chunks:
            own = _rows(arrays, chunk, rows if of_x is None else of_x)
            of_matrix = (rows[:, chunk].T @ inputs).astype(mx.float32)
            [matrix], gradients = mx.vjp(made, list(own.values()), [of_matrix])
            added = rows[:, chunk] @ matrix.astype(x.dtype)
            of_x = added if of_x is None else of_x + added
            for name, gradient in zip(names, gradients, strict=True):
                if name in _BY_ROW:
                    found[name].append(gradient)
                else:
                    sums[name] = sums[name] + gradient if name in sums else gradient
        assert of_x is not None
        sums |= {name: mx.concatenate(parts) for name, parts in found.items()}
        # MLX takes them in this order
        of_arrays = {name: sums[name] for name in names}
        return of_x.reshape(x.shape), of_arrays, [mx.zeros_like(each) for each in constants]

    product: Any = mx.custom_function(forward)
    product.vjp(backward)
    y: mx.array = product(x, arrays, constants)
    return y


def _rows(arrays: dict[str, mx.array], chunk: slice, given: mx.array) -> dict[str, mx.array]:
    """The arrays for some rows of a matrix, of which nothing is made before `given` is there.

    The matrices of all layers would otherwise be made at once.
    """
    own = [array[chunk] if name in _BY_ROW else array for name, array in arrays.items()]
    waiting: Any = mx.depends(own, [given])
    return dict(zip(arrays, waiting, strict=True))


def _moments(groups: mx.array) -> tuple[mx.array, mx.array]:
    """The mean of each group, and the mean distance from it, `(N, D / G, 1)`."""
    mean = mx.mean(groups, axis=2, keepdims=True)
    return mean, mx.mean(mx.abs(groups - mean), axis=2, keepdims=True) + _EPS


def _start(groups: mx.array, start: Start) -> tuple[mx.array, mx.array, mx.array]:
    """The shift, scale and threshold with which groups `(N, D / G, G)` begin, each `(N, D / G)`."""
    shape = groups.shape[:2]
    if start == "mean":
        return mx.zeros(shape), mx.zeros(shape), mx.zeros(shape)
    mean, size = _moments(groups)
    sizes = mx.abs(groups)
    least = 0.7 * mx.mean(sizes, axis=2, keepdims=True)
    is_large = (sizes > least).astype(mx.float32)
    count = mx.maximum(mx.sum(is_large, axis=2, keepdims=True), 1)
    scale = mx.sum(sizes * is_large, axis=2, keepdims=True) / count
    values = (1 - mean / size) / 2, scale / (2 * size), least / mx.maximum(scale, _EPS)
    shift, scale, threshold = (_logit(each)[..., 0] for each in values)
    return shift, scale, threshold


def _logit(x: mx.array) -> mx.array:
    """The inverse of the logistic function, away from its ends."""
    x = mx.clip(x, _MARGIN, 1 - _MARGIN)
    return mx.log(x / (1 - x))
