"""Linear layers with ternary weights.

Sources: BitNet b1.58 (arXiv 2402.17764) and MatMul-free language models (arXiv 2406.02528).
"""

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar, cast, get_args

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from .. import ops
from ..arguments import checks_layer
from ..ops.linear_product import add_bias
from ..ops.rms_norm_quantize import Rounding
from .arguments import check_features, check_sizes
from .dense import Linear
from .fusing import Fusable, Ternary, Variant
from .matrix import Matrix, are_same, matrices, matrix_of
from .norms import RMSNorm

LinearFactory = Callable[..., nn.Module]
"""Makes a projection: called as `linear(input_dims, output_dims, bias=...)`."""

Linears = LinearFactory | Mapping[str, LinearFactory]
"""Makes all projections of a mixer, or each by its name."""


def factory_of(linears: Linears, name: str) -> LinearFactory:
    """The function that makes the projection of this name.

    Raises:
        TypeError: It is no function, or a layer that is made already.
        ValueError: A mapping lacks the name.
    """
    # a module is a mapping of its parameters
    is_mapping = isinstance(linears, Mapping) and not isinstance(linears, nn.Module)
    try:
        found = cast(Mapping[str, LinearFactory], linears)[name] if is_mapping else linears
    except KeyError as error:
        known = ", ".join(map(repr, cast(Mapping[str, LinearFactory], linears)))
        raise ValueError(
            f"[linear] 'linear' must hold what makes {name!r} but holds {known}."
        ) from error
    if isinstance(found, nn.Module) or not callable(found):
        got = f"{found!r:.60}"
        if isinstance(found, nn.Module):
            got = f"a layer that is made already. Give its class: linear={type(found).__name__}"
        raise TypeError(
            "[linear] 'linear' must be a class or function that makes a linear layer, such as BitLinear "
            f"or Linear of mlx_mmfree.layers, or a mapping to such, but got {got}."
        )
    return found


class Float32Scales(nn.Module):
    """A module whose scales are float32 by construction.

    A cast of the scales that are there, as `set_dtype` makes, leaves them as they are: rounded ones
    would change every output of the matrix. Other values are converted.

    Attributes:
        in_float32: The names of what is float32.
    """

    in_float32: ClassVar[tuple[str, ...]] = ("scale", "input_scale")

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self.in_float32 and isinstance(value, mx.array) and value.dtype != mx.float32:
            old = self.get(key)
            if old is not None and mx.array_equal(old.astype(value.dtype), value):
                return
            value = value.astype(mx.float32)
        super().__setitem__(key, value)


class PackedLayer(Matrix, Float32Scales):
    """A layer of packed codes, which are never trained."""

    def unfreeze(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Unfreezes what can be trained; packed codes and their scales never are."""
        super().unfreeze(*args, **kwargs)
        self.freeze(recurse=False, keys=list(self.fixed_dtypes))
        return self


class _TernaryLinear(Matrix, nn.Module):
    """Base class of the ternary linears: norm, activation quantisation, scales and bias."""

    is_ternary = True
    # ordinary attributes, which take less time than the properties that they are elsewhere
    input_dims: int = 0
    output_dims: int = 0

    @checks_layer
    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        bias: bool = False,
        *,
        norm_eps: float | None = None,
        rounding: Rounding = "half_even",
        quantize_activations: bool = True,
    ):
        # a model makes hundreds of these, of sizes that its mixers have checked
        if not (type(input_dims) is type(output_dims) is int and min(input_dims, output_dims) > 0):
            check_sizes("BitLinear", input_dims=input_dims, output_dims=output_dims)
        if rounding not in get_args(Rounding):
            raise ValueError(
                f"[BitLinear] 'rounding' must be one of {', '.join(map(repr, get_args(Rounding)))} but "
                f"got {rounding!r:.80}."
            )
        super().__init__()
        self.input_dims, self.output_dims = input_dims, output_dims
        self._norm_eps = norm_eps
        self._rounding: Rounding = rounding
        self._quantize_activations = quantize_activations
        if norm_eps is not None:
            self.norm = RMSNorm(input_dims, eps=norm_eps)
        if bias:
            self.bias = mx.zeros((output_dims,))
        if self.holds_floats:
            bound = math.sqrt(1.0 / input_dims)
            self.weight = mx.random.uniform(-bound, bound, (output_dims, input_dims))
        elif self.holds_trits:
            shape = (output_dims, ops.packed_width(input_dims))
            self.weight = mx.full(shape, 0x55555555, dtype=mx.uint32)
            self.scale = mx.ones((1,))
            self.freeze(recurse=False, keys=list(self.fixed_dtypes))

    def packed_space(self) -> "PackedBitLinear":
        packed = PackedBitLinear(
            self.input_dims,
            self.output_dims,
            "bias" in self,
            norm_eps=self._norm_eps,
            rounding=self._rounding,
            quantize_activations=self._quantize_activations,
        )
        for name in ("norm", "bias"):
            if name in self:
                packed[name] = self[name]
        return packed

    def packed_from(self, weight: mx.array) -> "PackedBitLinear":
        packed = self.packed_space()
        trits, packed.scale = ops.ternarize(weight)
        packed.weight = ops.pack_ternary(trits)
        return packed

    def _extra_repr(self) -> str:
        return (
            f"input_dims={self.input_dims}, output_dims={self.output_dims}, bias={'bias' in self}, "
            f"norm_eps={self._norm_eps}, rounding={self._rounding}, "
            f"quantize_activations={self._quantize_activations}"
        )


class _FromMaster(_TernaryLinear):
    """A ternary linear whose trits are made, in each call, of a float master weight."""

    _quantization_strength = 1.0

    @property
    def master(self) -> mx.array:
        """The float weight, `(output_dims, input_dims)`."""
        raise NotImplementedError

    def to_packed(self) -> "PackedBitLinear":
        """The same layer with the weight ternarised once and packed.

        In float32 the results are equal bit for bit, except for the order of the sums where the
        activations are not quantised.
        """
        return self.packed_from(self.master)

    def packed_trits(self) -> mx.array:
        return ops.ternarize_packed(self.master)[0]

    def multiply(self, x: mx.array) -> mx.array:
        trits, scale = ops.ternarize(self.master)
        return (x.astype(mx.float32) @ trits.T) * scale

    def __call__(self, x: mx.array) -> mx.array:
        """The layer, straight-through for weight and activations."""
        check_features("BitLinear", x, self.input_dims)
        y = ops.ternary_linear(
            x,
            self.master,
            None if self._norm_eps is None else self.norm.weight,
            eps=self._norm_eps,
            quantization=ops.Quantization(
                self._rounding, self._quantize_activations, self._quantization_strength
            ),
        )
        return add_bias(y, self.bias) if "bias" in self else y

    # Python's own errors name it
    __call__.__qualname__ = "BitLinear.__call__"


class BitLinear(_FromMaster):
    r"""Linear layer with ternary weights and 8-bit activations, in its training variant.

    .. math::
        y = (q\,t^\top)\,m / s + b

    with the activation codes :math:`q` and their scale :math:`s` of `ops.rms_norm_quantize` and the
    trits :math:`t` and scale :math:`m` of `ops.ternarize`. Both quantisers are straight-through: the
    gradient is as for a linear layer whose input and weight are the quantised ones. The arithmetic
    is float32, but for bfloat16 inputs a GPU multiplies codes and trits in bfloat16, which holds them
    exactly; the result has the dtype of the input.

    Source: Ma et al., arXiv 2402.17764, eq. 1 to 5; with the norm inside, Zhu et al., arXiv
    2406.02528, sec. 3.2.

    Args:
        input_dims: Size of the last axis of the input.
        output_dims: Size of the last axis of the result.
        bias: Whether a bias is added.
        norm_eps: Epsilon of an RMSNorm of the input inside the layer; `None` means no norm. MatMul-free
            models use 1e-6, BitNet none.
        rounding: Ties of activation codes: `"half_even"` (BitNet) or `"half_away"` from zero
            (MatMul-free models). Weights are always rounded half to even.
        quantize_activations: `False` multiplies float activations, for checkpoints trained that way.

    Shape:
        Input `(..., input_dims)`, result `(..., output_dims)`.

    Raises:
        TypeError: A size is not an integer, or an argument is misspelt.
        ValueError: A size is not positive, or the rounding is unknown.

    Example:
        >>> layer = BitLinear(64, 32)
        >>> layer(mx.ones((2, 64))).shape
        (2, 32)
    """

    holds_floats = True

    @property
    def master(self) -> mx.array:
        weight: mx.array = self.weight
        return weight


class TiedBitLinear(_FromMaster):
    r"""A `BitLinear` head that reads the master weight of an embedding.

    .. math::
        y = (q\,t^\top)\,m / s

    with the letters of `BitLinear`, and trits and scale of the embedding's weight.

    Source: Ma et al., arXiv 2402.17764, with tied embeddings (Press and Wolf, arXiv 1608.05859).

    Args:
        embedding: Holds the shared weight `(output_dims, input_dims)`.
        norm_eps: Epsilon of an RMSNorm of the input inside the layer; `None` means no norm.
        rounding: Ties of activation codes: `"half_even"` or `"half_away"` from zero.

    Shape:
        Input `(..., input_dims)`, result `(..., output_dims)`.

    Example:
        >>> head = TiedBitLinear(nn.Embedding(10, 8), norm_eps=None)
        >>> head(mx.ones((1, 3, 8))).shape
        (1, 3, 10)
    """

    is_shared = True

    def __init__(
        self, embedding: nn.Embedding, *, norm_eps: float | None, rounding: Rounding = "half_even"
    ):
        output_dims, input_dims = embedding.weight.shape
        super().__init__(input_dims, output_dims, norm_eps=norm_eps, rounding=rounding)
        # Underscored: the weight is a parameter of the embedding alone.
        self._embedding = embedding

    @property
    def master(self) -> mx.array:
        weight: mx.array = self._embedding.weight
        return weight


class PackedBitLinear(Fusable, _TernaryLinear, PackedLayer):
    r"""The inference variant of `BitLinear`: packed trits and one float32 scale.

    .. math::
        y = (q\,t^\top)\,m / s + b

    Parameters are `weight`, `uint32` of shape `(output_dims, packed_width(input_dims))` in the layout
    of `ops.ternary`, `scale` :math:`m` of shape `(1,)`, which `set_dtype` leaves alone, and
    `norm.weight` and `bias` where present.

    Source: Ma et al., arXiv 2402.17764, eq. 1 to 5; with the norm inside, Zhu et al., arXiv
    2406.02528, sec. 3.2.

    Args:
        input_dims: Size of the last axis of the input.
        output_dims: Size of the last axis of the result.
        bias: Whether a bias is added.
        norm_eps: Epsilon of an RMSNorm of the input inside the layer; `None` means no norm. MatMul-free
            models use 1e-6, BitNet none.
        rounding: Ties of activation codes: `"half_even"` (BitNet) or `"half_away"` from zero
            (MatMul-free models).
        quantize_activations: `False` multiplies float activations, for checkpoints trained that way.

    Shape:
        Input `(..., input_dims)`, result `(..., output_dims)`.

    Raises:
        TypeError: A size is not an integer, or an argument is misspelt.
        ValueError: A size is not positive, or the rounding is unknown.

    Example:
        >>> layer = BitLinear(64, 32).to_packed()
        >>> type(layer).__name__, layer.weight.shape, layer(mx.ones((2, 64))).shape
        ('PackedBitLinear', (32, 4), (2, 32))
    """

    holds_trits = True
    is_divisible = True
    variant: ClassVar[type[Variant]] = Ternary
    fixed_dtypes = ("weight", "scale")

    def multiply(self, x: mx.array) -> mx.array:
        y: mx.array = ops.ternary_matmul(x.astype(mx.float32), self.weight) * self.scale
        return y

    def is_made_of(self, array: mx.array) -> bool:
        packed = self.packed_from(array)
        return all(mx.array_equal(packed[name], self[name]) for name in self.fixed_dtypes)

    @cached_property
    def activations(self) -> tuple[float | None, Rounding, bool]:
        """The arguments of `ops.bit_linear` for activations: epsilon, rounding, and whether."""
        return self._norm_eps, self._rounding, self._quantize_activations

    def __call__(self, x: mx.array) -> mx.array:
        check_features("BitLinear", x, self.input_dims)
        eps, rounding, quantize = self.activations
        norm = None if eps is None else self.norm.weight
        own = ops.Projection(self.weight, self.scale, norm)
        y = ops.bit_linear(x, (own,), eps=eps, rounding=rounding, quantize=quantize)
        return add_bias(y, self.bias) if "bias" in self else y


def set_quantization_strength(model: nn.Module, strength: float) -> int:
    r"""Sets, in place, how much of their quantisation the training variants in `model` apply.

    .. math::
        x + \lambda\,(Q(x) - x)

    takes the place of the quantised weights and activations; the gradient stays straight-through.
    `1` is the layer itself, `0` a float linear after the same norm; packed formats do not change.
    Source: the warm-up of the Llama3-8B-1.58 models (M. Mekkouri et al., "Fine-tuning LLMs to 1.58bit:
    extreme quantization made easy", huggingface.co/blog/1_58_llm_extreme_quantization, 2024).

    Args:
        model: What holds the layers.
        strength: :math:`\lambda`, from 0 to 1.

    Returns:
        The number of layers.

    Raises:
        ValueError: `strength` is out of range.

    Example:
        >>> layer = BitLinear(8, 4)
        >>> set_quantization_strength(layer, 0.0)
        1
        >>> x = mx.ones((1, 8))
        >>> mx.allclose(layer(x), x @ layer.weight.T, atol=1e-5).item()
        True
    """
    if not 0 <= strength <= 1:
        raise ValueError(f"[BitLinear] 'strength' must be from 0 to 1 but got {strength}.")
    found = (matrix for matrix in matrices(model).values() if matrix.is_ternary)
    layers = [matrix.layer for matrix in found if not matrix.holds_trits]
    for layer in layers:
        layer._quantization_strength = strength
    return len(layers)


def packable(model: nn.Module) -> dict[str, nn.Module]:
    """Finds the layers that have a packed format.

    Args:
        model: What holds the layers.

    Returns:
        Every layer that offers `to_packed()`, by its path.

    Example:
        >>> list(packable(nn.Sequential(BitLinear(8, 16), nn.ReLU(), nn.Linear(16, 4))))
        ['layers.0']
    """
    return {path: module for path, module in model.named_modules() if hasattr(module, "to_packed")}


def pack_linears(model: nn.Module) -> nn.Module:
    """Replaces, in place, every layer that has a packed format.

    Args:
        model: What holds layers that offer `to_packed()`, as `BitLinear` does.

    Returns:
        The model.

    Raises:
        TypeError: It is no module.

    Example:
        >>> model = pack_linears(nn.Sequential(BitLinear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
        >>> [type(layer).__name__ for layer in model.layers]
        ['PackedBitLinear', 'ReLU', 'Linear']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"[pack_linears] 'model' must be a module of MLX but got {type(model).__name__}."
        )
    packed = [(path, layer.to_packed()) for path, layer in packable(model).items()]
    model.update_modules(tree_unflatten(packed))
    return model


class PackedLinear(PackedLayer):
    r"""The packed format of a dense linear layer whose stored weight is already ternary.

    .. math::
        y = ((x \odot c)\,t^\top) \odot r + b

    with trits :math:`t` and scales of rows :math:`r` and of columns :math:`c`. Activations stay floats;
    the arithmetic is float32, the result has the dtype of the input.

    Parameters are `weight`, `uint32` of shape `(output_dims, packed_width(input_dims))` in the layout
    of `ops.ternary`, `scale` :math:`r`, float32 of shape `(1,)` or `(output_dims,)`, `input_scale`
    :math:`c`, float32 of shape `(input_dims,)`, where present, and `bias` where present. `set_dtype`
    leaves the scales alone.

    Source: ternary weight networks (Li et al., arXiv 1605.04711), with a scale for each row or column.

    Args:
        input_dims: Size of the last axis of the input.
        output_dims: Size of the last axis of the result.
        bias: Whether a bias is added.
        has_row_scales: Whether each row has a scale of its own; otherwise one serves all.
        has_column_scales: Whether each column has a scale.

    Shape:
        Input `(..., input_dims)`, result `(..., output_dims)`.

    Raises:
        TypeError: A size is not an integer, or an argument is misspelt.
        ValueError: A size is not positive, or the rounding is unknown.

    Example:
        >>> PackedLinear(64, 32)(mx.ones((2, 64))).shape
        (2, 32)
    """

    holds_trits = True
    is_divisible = True
    input_dims: int = 0
    output_dims: int = 0

    @checks_layer
    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        bias: bool = False,
        *,
        has_row_scales: bool = False,
        has_column_scales: bool = False,
    ):
        super().__init__()
        check_sizes("PackedLinear", input_dims=input_dims, output_dims=output_dims)
        self.input_dims, self.output_dims = input_dims, output_dims
        self.weight = mx.full(
            (output_dims, ops.packed_width(input_dims)), 0x55555555, dtype=mx.uint32
        )
        self.scale = mx.ones((output_dims if has_row_scales else 1,))
        if has_column_scales:
            self.input_scale = mx.ones((input_dims,))
        if bias:
            self.bias = mx.zeros((output_dims,))
        self.freeze(recurse=False, keys=list(self.fixed_dtypes))

    @property
    def fixed_dtypes(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("weight", *(name for name in self.in_float32 if name in self))

    def multiply(self, x: mx.array) -> mx.array:
        x = x.astype(mx.float32)
        x = x * self.input_scale if "input_scale" in self else x
        y: mx.array = ops.ternary_matmul(x, self.weight) * self.scale
        return y

    def gathered(
        self, x: mx.array, indices: mx.array, count: int, starts: mx.array | None = None
    ) -> mx.array:
        x = x.astype(mx.float32)
        x = x * self.input_scale if "input_scale" in self else x
        weight = mx.unflatten(self.weight, 0, (count, -1))
        sums = ops.gather_ternary_matmul(x, weight, indices, starts=starts)
        is_single = self.scale.size == 1
        scales = self.scale if is_single else mx.unflatten(self.scale, 0, (count, -1))[indices]
        return sums * scales

    def written_out(self, parts: Mapping[str, mx.array]) -> mx.array:
        matrix = ops.unpack_ternary(parts["weight"], self.input_dims) * parts["scale"][:, None]
        if "input_scale" in parts:
            matrix = matrix * parts["input_scale"]
        return matrix.astype(mx.float32)

    def is_made_of(self, array: mx.array) -> bool:
        return are_same(self.multiply(mx.eye(self.input_dims)).T, array)

    def _extra_repr(self) -> str:
        return (
            f"input_dims={self.input_dims}, output_dims={self.output_dims}, bias={'bias' in self}, "
            f"scale={self.scale.shape}, has_column_scales={'input_scale' in self}"
        )

    def __call__(self, x: mx.array) -> mx.array:
        check_features("PackedLinear", x, self.input_dims)
        # a GPU computes the gradient in the dtype that meets the matrix
        scaled = x.astype(mx.float32) * self.input_scale if "input_scale" in self else x
        y = ops.ternary_matmul(scaled, self.weight, codes=False) * self.scale
        if "bias" in self:
            y = y + self.bias
        return y.astype(x.dtype)


class Float32Linear(Float32Scales, Linear):
    """A plain linear layer whose weight and arithmetic are float32, whatever the model's dtype.

    The rounding of 16 bits may change what a router chooses.

    Args: as `nn.Linear`.

    Shape:
        Input `(..., input_dims)`, result `(..., output_dims)`, float32.

    Example:
        >>> layer = Float32Linear(8, 4)
        >>> layer.set_dtype(mx.bfloat16)
        >>> layer.weight.dtype, layer(mx.ones((2, 8), mx.bfloat16)).dtype
        (mlx.core.float32, mlx.core.float32)
    """

    in_float32 = ("weight", "bias")

    def __call__(self, x: mx.array) -> mx.array:
        return ops.linear_product(x.astype(mx.float32), self["weight"], self.get("bias"))


def gathered_product(
    linear: nn.Module,
    x: mx.array,
    indices: mx.array,
    count: int,
    starts: mx.array | None = None,
) -> mx.array:
    r"""Applies to each row one of several linears, whose rows lie one after the other in one.

    .. math::
        y_r = x_r\,W_{i_r}^\top

    Args:
        linear: A linear layer of `count * N` outputs without a bias, or one with an adapter.
        x: `(..., D)`.
        indices: The linear :math:`i_r` of each row, integers `(...)`.
        count: How many there are.
        starts: Where rows `(rows, D)` are sorted by their linears: where the rows of each begin, and
            their number, integers `(count + 1,)`. A GPU then reads each matrix once.

    Returns:
        float32 `(..., N)`.

    Raises:
        TypeError: The layer has no matrix that can be parted.

    Example:
        >>> two = nn.Linear(8, 2 * 4, bias=False)
        >>> gathered_product(two, mx.ones((3, 8)), mx.array([0, 1, 1]), 2).shape
        (3, 4)
    """
    matrix = matrix_of(linear)
    gathered: Any = getattr(linear if matrix is None else matrix, "gathered", None)
    if gathered is None:
        raise TypeError(
            f"[gathered_product] 'linear' must be a linear layer but got {type(linear).__name__}."
        )
    y: mx.array = gathered(x, indices, count, starts)
    return y


def split_heads(x: mx.array, num_heads: int) -> mx.array:
    """`(B, L, H * K)` as `(B, H, L, K)`."""
    return mx.unflatten(x, -1, (num_heads, -1)).swapaxes(1, 2)


def merge_heads(x: mx.array) -> mx.array:
    """`(B, H, L, K)` as `(B, L, H * K)`."""
    return mx.flatten(x.swapaxes(1, 2), 2)


def one_hot_values(batch_size: int, num_heads: int, length: int) -> mx.array:
    """The values for which a sum of weighted values is the weights, float32 `(B, H, N, N)`."""
    return mx.broadcast_to(mx.eye(length), (batch_size, num_heads, length, length))
