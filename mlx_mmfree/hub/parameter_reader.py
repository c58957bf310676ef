"""Reads a checkpoint one parameter at a time, ternary matrices in packed form."""

from functools import cached_property

import mlx.core as mx

from ..layers import PackedBitLinear, TiedBitLinear, pack_linears
from ..models import Decoder
from ..ops import pack_ternary, ternarize
from .affine_format import KEYS as AFFINE_KEYS
from .affine_format import QuantizedModule
from .checkpoint import Checkpoint
from .load import check_finite, check_packed
from .skeleton import build_skeleton, parameters
from .tensor_entry import TensorEntry, read_tensors


class ParameterReader:
    """A checkpoint as the packed model that `load` makes of it, without holding its weights.

    Args:
        checkpoint: The checkpoint.

    Attributes:
        checkpoint: The checkpoint.
        model: The model, packed, without weights.
        names: Names on disk and in memory.

    Raises:
        CheckpointError, UnsupportedModelError: As for `load`.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        skeleton = build_skeleton(checkpoint)
        self.names = skeleton.names
        self._entries = skeleton.entries
        self._forms = skeleton.forms
        self._tied = {
            path
            for path, module in skeleton.model.named_modules()
            if isinstance(module, TiedBitLinear)
        }
        self.model: Decoder = skeleton.model
        pack_linears(self.model)

    @cached_property
    def ternary(self) -> dict[str, PackedBitLinear]:
        """The packed linears by their paths."""
        return {
            path: module
            for path, module in self.model.named_modules()
            if isinstance(module, PackedBitLinear)
        }

    @cached_property
    def quantized(self) -> dict[str, QuantizedModule]:
        """The modules in MLX's affine form by their paths."""
        return {
            path: module
            for path, module in self.model.named_modules()
            if isinstance(module, QuantizedModule)
        }

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters by their names in memory."""
        return {name: array.shape for name, array in parameters(self.model).items()}

    @cached_property
    def activation_dtype(self) -> mx.Dtype:
        """The dtype in which the loaded model computes."""
        return self.dtype("embed.scales" if "embed" in self.quantized else "embed.weight")

    def is_tied(self, path: str) -> bool:
        """Whether a ternary head is stored as the embedding's master weight."""
        return path in self._tied

    def has_masters(self, path: str) -> bool:
        """Whether a ternary linear is stored as float master weights."""
        return f"{path}.scale" not in self._entries

    def dtype(self, name: str) -> mx.Dtype:
        """The dtype in which a parameter is stored."""
        return self.entry(name).dtype

    def entry(self, name: str) -> TensorEntry:
        """Where a parameter, or the master weight of a ternary linear, is stored."""
        path = name.rpartition(".")[0]
        return self._entries["embed.weight" if path in self._tied else name]

    def read(self, name: str) -> mx.array:
        """One parameter as it is stored, or the master weight of a ternary linear.

        Raises:
            CheckpointError: The file changed, or the tensor is damaged.
        """
        entry = self.entry(name)
        [(_, array)] = read_tensors(entry.file, [entry])
        if name in self._forms:
            array = self._forms[name].read(array)
        mx.eval(array)
        if mx.issubdtype(array.dtype, mx.floating):
            check_finite(array, entry)
        return array

    def read_dequantized(self, path: str) -> mx.array:
        """The float matrix that a module in MLX's affine form stands for."""
        module = self.quantized[path]
        weight, scales, biases = (self.read(f"{path}.{key}") for key in AFFINE_KEYS)
        return mx.dequantize(weight, scales, biases, module.group_size, module.bits)

    def read_ternary(self, path: str) -> tuple[mx.array, mx.array]:
        """A ternary linear's packed weight and its float32 scale, ternarised if it is stored as floats.

        Raises:
            CheckpointError: The file changed, or a tensor is damaged.
        """
        name = f"{path}.weight"
        weight = self.read(name)
        if self.has_masters(path):
            trits, scale = ternarize(weight)
            weight = pack_ternary(trits)
            del trits
            mx.eval(weight, scale)
            return weight, scale
        scale = self.read(f"{path}.scale")
        module = self.ternary[path]
        check_packed(weight, "weight", module.input_dims, self.entry(name))
        check_packed(scale, "scale", module.input_dims, self.entry(f"{path}.scale"))
        return weight, scale
