"""Reads a checkpoint parameter by parameter, with ternary matrices in packed format."""

from functools import cached_property

import mlx.core as mx
import mlx.nn as nn

from ...files.tensors import TensorEntry, read_tensor
from ...layers.linear import Float32Scales
from ...layers.matrix import FEW_BITS, Matrix, StoredLayout, matrices, parameters, stored_layouts
from ...layers.ternary.values import pack_ternary_values
from ...models import Decoder
from ...ops import ternarize_packed
from ...ops.device import FLOATS
from .checkpoint import Checkpoint
from .weights import EMBEDDING, build_skeleton, check_finite, check_packed, exact_floats

_RATES = (".A_log", ".dt_bias", ".D")


class ParameterReader:
    """A checkpoint in terms of the packed model that `load` makes of it. It holds no weights.

    Args:
        checkpoint: The checkpoint.

    Attributes:
        checkpoint: The checkpoint.
        model: The packed model, without weights.
        names: Names on disk and in memory.
        own_layouts: As `layouts`, but as they lie in this checkpoint.

    Raises:
        CheckpointError, UnsupportedModelError: As for `load`.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        skeleton = build_skeleton(checkpoint, packed=True)
        self.names = skeleton.names
        self._entries = skeleton.entries
        self._stored = skeleton.stored
        self._masters = skeleton.masters
        self.own_layouts = skeleton.layouts
        self.model: Decoder = skeleton.model
        self._exact = exact_floats(skeleton)

    @cached_property
    def matrices(self) -> dict[str, Matrix]:
        """The matrices of the model by the paths of their layers."""
        return matrices(self.model)

    @cached_property
    def ternary(self) -> dict[str, Matrix]:
        """The packed ternary linears by their paths."""
        return {path: matrix for path, matrix in self.matrices.items() if matrix.is_ternary}

    @property
    def holds_ternary(self) -> bool:
        """True if a matrix is ternary, by how it is stored or by its values.

        One of codes of 1 bit is not, since it has no zeros.
        """
        by_values = self.ternary_values.keys() - self._in_one_bit
        return bool(self.ternary or self.packed_dense or by_values)

    @property
    def tags(self) -> tuple[str, ...]:
        """The Hub's name for weights of one bit, where there are some."""
        return ("1-bit",) if self._in_one_bit else ()

    @cached_property
    def _in_one_bit(self) -> set[str]:
        return {path for path, layer in self.quantized.items() if layer.bits == 1}

    @property
    def ternary_dims(self) -> tuple[int, ...]:
        """The input dims of the packed linears."""
        return tuple(module.input_dims for module in self.ternary.values())

    @cached_property
    def quantized(self) -> dict[str, nn.Module]:
        """The modules in codes with a scale and a bias for each group of inputs, by their paths."""
        return {path: matrix.layer for path, matrix in self.matrices.items() if matrix.holds_codes}

    @cached_property
    def few_bits(self) -> tuple[str, ...]:
        """The paths of those with codes of 1 or 2 bits, which stand for signs or trits."""
        return tuple(path for path, layer in self.quantized.items() if layer.bits in FEW_BITS)

    @cached_property
    def packed_dense(self) -> dict[str, Matrix]:
        """The matrices with float activations in any other few-bit format, by their paths."""
        return {
            path: matrix
            for path, matrix in self.matrices.items()
            if matrix.is_packed and not matrix.is_ternary and not matrix.holds_codes
        }

    @cached_property
    def ternary_values(self) -> dict[str, nn.Module]:
        """The linears of a dense model whose values are ternary, by their paths, without their codes.

        They may be stored as floats, packed or in codes. Each linear is read once for this.
        """
        if self.ternary:
            return {}
        found: dict[str, nn.Module] = {}
        for path, matrix in self.matrices.items():
            if not matrix.is_embedding:
                packed = pack_ternary_values(_holding(self.read_matrix(path)))
                if packed is not None:
                    mx.eval(packed.parameters())
                    packed.weight = mx.zeros((0,), mx.uint32)
                    found[path] = packed
                mx.clear_cache()
        return found

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters by their names in memory."""
        return {name: array.shape for name, array in parameters(self.model).items()}

    @cached_property
    def layouts(self) -> dict[str, StoredLayout]:
        """How float arrays lie on the Hub that differ in memory, by their names in memory."""
        return stored_layouts(self.model)

    @property
    def lies_as_on_hub(self) -> bool:
        """True if all float arrays lie as on the Hub, not as mlx-lm has them."""
        on_hub = self.layouts
        return all(
            name in on_hub
            and (own.shape, own.changes) == (on_hub[name].shape, on_hub[name].changes)
            for name, own in self.own_layouts.items()
        )

    @cached_property
    def activation_dtype(self) -> mx.Dtype:
        """The dtype of the loaded model: its embedding's, or its first floats'."""
        names = ("embed.scales", "embed.weight", *self.shapes)
        stored = (self.dtype(name) for name in names if name in self._entries)
        return next(dtype for dtype in stored if dtype in FLOATS)

    @cached_property
    def in_float32(self) -> set[str]:
        """The parameters that are float32 whatever the dtype of the model, by their names in memory."""
        layers = {p: m for p, m in self.model.named_modules() if isinstance(m, Float32Scales)}
        return {f"{path}.{key}" for path, layer in layers.items() for key in layer.in_float32}

    @cached_property
    def rates(self) -> set[str]:
        """The decay rates, step biases and skips of recurrences, which 16 bits of a long text blur.

        They stay in float32 where they are stored so, by their names in memory.
        """
        return {name for name in self.shapes if self.names.to_disk(name).endswith(_RATES)}

    def keep_floats(self) -> None:
        """Counts what is stored in float32, but for matrices, among what stays so."""
        self.in_float32.update(self._exact)

    def is_tied(self, path: str) -> bool:
        """Returns whether a ternary head is stored as the embedding's master weight."""
        return self._masters.get(path) == EMBEDDING

    def has_masters(self, path: str) -> bool:
        """Returns whether a ternary linear is stored as float master weights."""
        return path in self._masters

    def dtype(self, name: str) -> mx.Dtype:
        """The dtype in which a parameter is stored."""
        return self.entry(name).dtype

    def entry(self, name: str) -> TensorEntry:
        """The tensor of a parameter, or of the master weight of a ternary linear."""
        path = name.rpartition(".")[0]
        return self._entries[EMBEDDING if self.is_tied(path) else name]

    def read(self, name: str) -> mx.array:
        """One parameter as it is stored, or the master weight of a ternary linear.

        Raises:
            CheckpointError: The file changed, or the tensor is damaged.
        """
        entry = self.entry(name)
        array = read_tensor(entry)
        if name in self._stored:
            array = self._stored[name].read(array)
        mx.eval(array)
        if mx.issubdtype(array.dtype, mx.floating):
            check_finite(array, entry)
        return array

    def matrix_shape(self, path: str) -> tuple[int, int]:
        """The outputs and inputs of a linear or an embedding, in whatever format it is stored."""
        matrix = self.matrices[path]
        return matrix.output_dims, matrix.input_dims

    def matrix_dtype(self, path: str) -> mx.Dtype:
        """The dtype in which a matrix is stored: of its floats or scales, or of what it computes."""
        if path in self.packed_dense:
            return self.activation_dtype
        return self.dtype(f"{path}.scales" if path in self.quantized else f"{path}.weight")

    def read_matrix(self, path: str) -> mx.array:
        """The float matrix of a linear or an embedding that is not a `BitLinear`.

        A matrix in few bits is given in float32, so that it is rounded only once, when it is written.
        """
        prefix = f"{path}."
        parts = {name.removeprefix(prefix): self.read(name) for name in self.parts(path)}
        return self.matrices[path].written_out(parts)

    def parts(self, path: str) -> set[str]:
        """The names of the parameters that make up a matrix: all of its layer but the bias."""
        matrix = self.matrices[path]
        if not matrix.is_packed:
            return {f"{path}.weight"}
        names = {f"{path}.{key}" for key in matrix.layer if key != "bias"}
        return names & self.shapes.keys()

    def read_ternary(self, path: str) -> tuple[mx.array, mx.array]:
        """The packed weight and the float32 scale of a ternary linear. Floats are ternarised.

        Raises:
            CheckpointError: The file changed, or a tensor is damaged.
        """
        name = f"{path}.weight"
        weight = self.read(name)
        if self.has_masters(path):
            weight, scale = ternarize_packed(weight)
            mx.eval(weight, scale)
            return weight, scale
        scale = self.read(f"{path}.scale")
        arrays = {name: weight, f"{path}.scale": scale}
        check_packed({path: self.ternary[path]}, arrays, self._entries)
        return weight, scale


def _holding(weight: mx.array) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=False)
    linear.weight = weight
    return linear
