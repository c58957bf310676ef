"""The matrix of a linear layer or an embedding, and how a model describes its parameters."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import CheckpointError
from ..ops import AffineFormat, dense_matmul, gather_affine_matmul
from ..ops.dense_matmul import BITS, GROUP_SIZES
from ..ops.device import FLOATS
from ..ops.host_blocks import all_finite

FEW_BITS = (1, 2)
"""The bits of codes that stand for signs or trits."""


class Matrix:
    """The matrix `W`, `(output_dims, input_dims)`, of a linear layer or an embedding.

    A layer of this package is a `Matrix` itself; `matrix_of` adapts MLX's layers.

    Attributes:
        holds_floats: The parameter `weight` of the layer is the matrix itself.
        holds_trits: The layer holds trits of 2 bits (`ops.ternary`) and scales.
        holds_codes: The layer holds codes, scales and biases of MLX's affine format.
        is_shared: The layer holds no matrix of its own, as a head that shares the embedding's. A layer
            that neither shares one nor holds floats is packed: its weights have few bits.
        is_ternary: The layer is a `BitLinear` in one of its formats: it computes with the trits of the
            matrix that it is given, whatever its values.
        is_embedding: The layer gives the rows of tokens, and only backwards the product with `W`.
        is_rotated: The layer holds a rotated matrix in codes, and rotates its input.
        fixed_dtypes: Names of the layer's parameters whose dtype never changes.
    """

    holds_floats: ClassVar[bool] = False
    holds_trits: ClassVar[bool] = False
    holds_codes: ClassVar[bool] = False
    is_shared: ClassVar[bool] = False
    is_ternary: ClassVar[bool] = False
    is_embedding: ClassVar[bool] = False
    is_rotated: ClassVar[bool] = False
    fixed_dtypes: ClassVar[tuple[str, ...]] = ()

    @property
    def layer(self) -> nn.Module:
        """The layer that the matrix belongs to."""
        return cast(nn.Module, self)

    @property
    def input_dims(self) -> int:
        """Columns."""
        raise NotImplementedError

    @property
    def output_dims(self) -> int:
        """Rows."""
        raise NotImplementedError

    @property
    def dtype(self) -> mx.Dtype | None:
        """The dtype of its floats, or of the scales of its codes; `None` for trits."""
        return None

    @property
    def is_packed(self) -> bool:
        """Returns whether the layer holds the matrix in few bits, whatever the format."""
        return not (self.holds_floats or self.is_shared)

    @property
    def is_plain(self) -> bool:
        """Returns whether the layer is a matrix of floats and perhaps a bias, nothing else.

        Another format of the same matrix may then take its place.
        """
        return False

    @property
    def is_divisible(self) -> bool:
        """Returns whether processes can hold equal parts of it, as `sharded_linear` makes them."""
        return False

    @property
    def group_size(self) -> int:
        """Neighbouring inputs that cannot be parted, since they share a scale."""
        return 1

    def alike(self) -> tuple[Any, ...] | None:
        """A key that layers share whose rows may lie in one array and be one layer; `None`: none may."""
        return None

    def in_codes(self, group_size: int, bits: int) -> nn.Module:
        """The same layer with capacity for codes of MLX's affine format, where it `is_plain`."""
        raise NotImplementedError

    def packed_space(self) -> nn.Module:
        """The packed layer, where it `is_ternary`, with uninitialised trits and scale."""
        raise NotImplementedError

    def packed_trits(self) -> mx.array:
        """The words of the trits (`ops.pack_ternary`) of a layer in its training variant."""
        raise NotImplementedError

    def packed_from(self, weight: mx.array) -> nn.Module:
        """The packed format of the layer, where it `is_ternary`, with the trits of another matrix."""
        raise NotImplementedError

    def written_out(self, parts: Mapping[str, mx.array]) -> mx.array:
        """The float matrix, given the layer's parameters; a matrix of few bits gives float32."""
        return parts["weight"]

    def is_made_of(self, array: mx.array) -> bool:
        """Returns whether an array of its shape is the matrix, or became it in the layer's format."""
        return are_same(self.layer.weight, array)

    def multiply(self, x: mx.array) -> mx.array:
        """`x W^T` in float32 with the matrix alone: no norm, no quantised activations, no bias."""
        raise NotImplementedError

    def gathered(
        self, x: mx.array, indices: mx.array, count: int, starts: mx.array | None = None
    ) -> mx.array:
        """Multiplies each row of `x` with one of `count` equal parts of the rows of `W`, like
        `multiply`.

        Args:
            x: `(..., D)`.
            indices: The part of each row, integers `(...)`.
            count: E. The layer has no bias.
            starts: Where rows `(rows, D)` are sorted by parts: where the rows of each begin, and their
                number, integers `(E + 1,)`.

        Returns:
            float32 `(..., N / E)`.
        """
        raise NotImplementedError


class _OfMLX(Matrix):
    """The matrix of a layer of MLX."""

    def __init__(self, layer: nn.Module):
        self._layer = layer

    @property
    def layer(self) -> nn.Module:
        return self._layer

    @property
    def output_dims(self) -> int:
        return int(self._layer.weight.shape[0])

    @property
    def is_ordinary(self) -> bool:
        """Returns whether a call of the layer does what MLX's does, and nothing else."""
        kind = type(self._layer)
        return getattr(kind, "is_ordinary", kind.__call__ in _CALLS)

    @property
    def is_divisible(self) -> bool:
        return self.is_ordinary and not self.is_embedding


class _Floats(_OfMLX):
    holds_floats = True

    @property
    def dtype(self) -> mx.Dtype:
        return cast(mx.Dtype, self._layer.weight.dtype)

    @property
    def is_plain(self) -> bool:
        return self.is_ordinary

    @property
    def input_dims(self) -> int:
        return int(self._layer.weight.shape[1])

    def alike(self) -> tuple[Any, ...] | None:
        layer, dtype = self._layer, self.dtype
        own = "bias" in layer, layer["bias"].dtype if "bias" in layer else dtype
        return ("floats", dtype, *own) if self.is_plain else None

    def in_codes(self, group_size: int, bits: int) -> nn.Module:
        has_bias = "bias" in self._layer
        kind: Any = getattr(self._layer, "coded", nn.QuantizedLinear)
        layer: nn.Module = kind(self.input_dims, self.output_dims, has_bias, group_size, bits)
        return layer

    def multiply(self, x: mx.array) -> mx.array:
        y: mx.array = x.astype(mx.float32) @ self._layer.weight.astype(mx.float32).T
        return y

    def gathered(
        self, x: mx.array, indices: mx.array, count: int, starts: mx.array | None = None
    ) -> mx.array:
        # MLX gathers floats of 32 bits alone on a CPU
        weight = self._layer.weight.astype(mx.float32).reshape(count, -1, self.input_dims)
        rows = x.astype(mx.float32)[..., None, :]
        weight, is_sorted = weight.swapaxes(1, 2), starts is not None
        y = mx.gather_mm(rows, weight, rhs_indices=indices, sorted_indices=is_sorted)
        return y[..., 0, :]


class _Codes(_OfMLX):
    holds_codes = True
    fixed_dtypes = ("weight",)

    @property
    def input_dims(self) -> int:
        return int(self._layer.weight.shape[1]) * 32 // self._layer.bits

    @property
    def dtype(self) -> mx.Dtype:
        return cast(mx.Dtype, self._layer.scales.dtype)

    @property
    def group_size(self) -> int:
        return int(self._layer.group_size)

    def alike(self) -> tuple[Any, ...] | None:
        layer, dtype = self._layer, self.dtype
        own = "bias" in layer, layer["bias"].dtype if "bias" in layer else dtype
        same = dtype, *own, layer.group_size, layer.bits, layer.mode
        return ("codes", *same) if self.is_ordinary else None

    def multiply(self, x: mx.array) -> mx.array:
        layer: Any = self._layer
        scales, biases = (layer[key].astype(mx.float32) for key in ("scales", "biases"))
        format = AffineFormat(scales, biases, layer.group_size, layer.bits)
        return affine_product(x.astype(mx.float32), layer.weight, format)

    def gathered(
        self, x: mx.array, indices: mx.array, count: int, starts: mx.array | None = None
    ) -> mx.array:
        layer: Any = self._layer
        parts = (mx.unflatten(layer[key], 0, (count, -1)) for key in ("weight", "scales", "biases"))
        weight, scales, biases = parts
        format = AffineFormat(scales, biases, layer.group_size, layer.bits)
        return gather_affine_matmul(x, weight, format, indices, starts=starts)

    def written_out(self, parts: Mapping[str, mx.array]) -> mx.array:
        scales, biases = (parts[key].astype(mx.float32) for key in ("scales", "biases"))
        matrix: mx.array = mx.dequantize(
            parts["weight"], scales, biases, self._layer.group_size, self._layer.bits
        )
        return matrix

    def is_made_of(self, array: mx.array) -> bool:
        layer = self._layer
        codes = mx.quantize(array.astype(layer.scales.dtype), layer.group_size, layer.bits)
        return all(map(mx.array_equal, codes, (layer.weight, layer.scales, layer.biases)))


class _EmbeddingFloats(_Floats):
    is_embedding = True

    def in_codes(self, group_size: int, bits: int) -> nn.Module:
        return nn.QuantizedEmbedding(self.output_dims, self.input_dims, group_size, bits)


class _EmbeddingCodes(_Codes):
    is_embedding = True


_KINDS: dict[type[nn.Module], type[_OfMLX]] = {
    nn.Linear: _Floats,
    nn.Embedding: _EmbeddingFloats,
    nn.QuantizedLinear: _Codes,
    nn.QuantizedEmbedding: _EmbeddingCodes,
}
"""The layers of MLX, and what answers for each and for its subclasses."""

_CALLS = {kind.__call__ for kind in _KINDS}


def matrix_of(module: nn.Module) -> Matrix | None:
    """The matrix of a linear layer or an embedding; `None` for any other module."""
    if isinstance(module, Matrix):
        return module
    adapter = next((_KINDS[kind] for kind in type(module).__mro__ if kind in _KINDS), None)
    return None if adapter is None else adapter(module)


def affine_product(x: mx.array, weight: mx.array, format: AffineFormat) -> mx.array:
    """`x W^T` in the dtype of `x` for codes in MLX's affine format.

    `dense_matmul` takes a fiftieth of the time of MLX's product on a CPU, for the sizes that it knows.
    """
    scales, biases, group_size, bits = format
    if bits in BITS and group_size in GROUP_SIZES:
        return dense_matmul(x, weight, format, dtype=x.dtype)
    y = mx.quantized_matmul(x, weight, scales, biases, group_size=group_size, bits=bits)
    return y.astype(x.dtype)


def affine_format(layer: nn.Module) -> AffineFormat | None:
    """The format of a layer of codes as MLX holds them; `None` unless `dense_matmul` takes it."""
    size, bits = layer.group_size, layer.bits
    if layer.mode != "affine" or bits not in BITS or size not in GROUP_SIZES:
        return None
    return AffineFormat(layer["scales"], layer["biases"], size, bits)


def matrices(model: nn.Module) -> dict[str, Matrix]:
    """The matrices of all linear layers and embeddings in a model, by the paths of the layers."""
    found = ((path, matrix_of(module)) for path, module in model.named_modules())
    return {path: matrix for path, matrix in found if matrix is not None}


def are_same(a: mx.array, b: mx.array) -> bool:
    """Returns whether two arrays are equal in the coarser of their dtypes."""
    dtype = min(a.dtype, b.dtype, key=lambda dtype: dtype.size)
    return a.shape == b.shape and bool(mx.array_equal(a.astype(dtype), b.astype(dtype)))


Model = TypeVar("Model", bound=nn.Module)


def parameters(model: nn.Module) -> dict[str, mx.array]:
    """All parameters of a model by their names."""
    return dict(tree_flatten(model.parameters()))


def fixed_dtype_names(model: nn.Module) -> set[str]:
    """Names of the parameters whose dtype never changes: the parameters of packed matrices."""
    return {
        f"{path}.{name}" for path, matrix in matrices(model).items() for name in matrix.fixed_dtypes
    }


def cast_weight(array: mx.array, dtype: mx.Dtype, name: str) -> mx.array:
    """Finite floats in another dtype.

    Raises:
        CheckpointError: One of them is beyond the range of the dtype.
    """
    cast = array.astype(dtype)
    if dtype.size < array.dtype.size or (array.dtype, dtype) == (mx.bfloat16, mx.float16):
        check_range(cast, array, name)
    return cast


_HINT = "Give the dtype bfloat16 or float32 (--dtype bfloat16)."


def check_range(cast: mx.array, array: mx.array, name: str, hint: str = _HINT) -> None:
    """Refuses a cast of finite floats that is infinite.

    Args:
        cast: The floats in the new dtype.
        array: Those before.
        name: The tensor, for the message.
        hint: The end of the message.

    Raises:
        CheckpointError: One of them is beyond the range of the dtype.
    """
    if all_finite(cast):
        return
    peak = mx.max(mx.abs(array)).item()
    shown = str(cast.dtype).removeprefix("mlx.core.")
    raise CheckpointError(
        f"[dtype] tensor {name!r:.100} must lie within the range of {shown}, up to "
        f"{mx.finfo(cast.dtype).max:,.6g}, but holds {peak:,.6g}. {hint}"
    )


def converted(
    model: Model,
    dtype: mx.Dtype,
    fixed_dtypes: Collection[str] = (),
    shown: Callable[[str], str] = str,
) -> Model:
    """The model with its floats in another dtype, in place, but for the `fixed_dtypes`.

    Args:
        model: The model.
        dtype: The dtype.
        fixed_dtypes: Names of further parameters that keep their dtype.
        shown: From the name of a parameter, its name in messages.

    Raises:
        CheckpointError: A weight is beyond the range of the dtype.
    """
    packed = fixed_dtype_names(model)
    modules = dict(model.named_modules())
    for name, array in parameters(model).items():
        if array.dtype in FLOATS and name in packed:
            # weights are products of trits and these
            cast_weight(array, dtype, shown(name))
        elif array.dtype in FLOATS and name not in fixed_dtypes:
            path, _, key = name.rpartition(".")
            array = cast_weight(array, dtype, shown(name))
            setattr(modules[path], key, array)
        mx.eval(array)
    return model


class StoredLayout(NamedTuple):
    """The layout of an array on disk.

    A layer says it of its parameters, and of its parts', as `stored_layouts`, a mapping from their names
    after its own path.

    Attributes:
        shape: The shape on disk.
        read: Turns the array on disk into the one in memory.
        write: Turns it back.
        changes: Whether numbers change too: one that 16 bits hold may take 32 in the other layout.
    """

    shape: tuple[int, ...]
    read: Callable[[mx.array], mx.array]
    write: Callable[[mx.array], mx.array]
    changes: bool = False

    @classmethod
    def reshaped(cls, shape: tuple[int, ...], in_memory: tuple[int, ...]) -> "StoredLayout":
        """The same numbers in the same order."""
        return cls(shape, lambda x: x.reshape(in_memory), lambda x: x.reshape(shape))

    @classmethod
    def convolution(cls, outputs: int, inputs: int, side: int) -> "StoredLayout":
        """The weight of a convolution as PyTorch has it, in memory a matrix `(O, side * side * I)`."""

        def read(x: mx.array) -> mx.array:
            return mx.moveaxis(x, 1, -1).reshape(outputs, -1)

        def write(x: mx.array) -> mx.array:
            return mx.moveaxis(x.reshape(outputs, side, side, inputs), -1, 1)

        return cls((outputs, inputs, side, side), read, write)


def stored_layouts(model: nn.Module) -> dict[str, StoredLayout]:
    """The stored layouts of all layers of a model, by the names of the parameters in memory."""
    return {
        f"{path}.{name}" if path else name: layout
        for path, module in model.named_modules()
        for name, layout in getattr(module, "stored_layouts", {}).items()
    }
