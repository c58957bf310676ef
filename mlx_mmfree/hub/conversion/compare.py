"""Compares a written checkpoint with its source, tensor by tensor."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ...files.safetensors_writer import tensor_bytes
from ...files.tensor_entry import read_tensor
from ...ops.ternary import unpack_ternary
from ..checkpoint.forms.affine_format import KEYS
from ..checkpoint.parameter_reader import ParameterReader
from .plan import FloatForms
from .to_mlx import quantized_forms, ternary_forms


class Comparison:
    """Two checkpoints, of which one was made of the other.

    Args:
        source: The source.
        target: What was written.
        forms: What became of float weights.
        scale_dtype: The dtype in which the written form holds the scale of a ternary matrix.
    """

    def __init__(
        self,
        source: ParameterReader,
        target: ParameterReader,
        forms: FloatForms,
        scale_dtype: mx.Dtype,
    ):
        self._source = source
        self._target = target
        self._scale_dtype = scale_dtype
        made = {**ternary_forms(source), **quantized_forms(source, forms)}
        self._made = {
            path: form for path, form in made.items() if form[:2] == _affine_form(target, path)
        }
        self._done: set[str] = set()

    def differences(self) -> Iterator[tuple[str, float]]:
        """Yields the parameters, by their names in memory, with the largest difference of a weight.

        Raises:
            CheckpointError: A parameter is not what the conversion makes of the source's.
        """
        for path in self._source.ternary:
            yield self._compare_ternary(path)
        for path in self._made:
            yield self._compare_made(path)
        for path in self._target.quantized:
            if path in self._made or f"{path}.weight" in self._done:
                continue
            if _affine_form(self._source, path) != _affine_form(self._target, path):
                yield self._compare_values(path)
        for name in self._target.shapes:
            if name not in self._done:
                yield self._compare_stored(name)
            mx.clear_cache()

    def _compare_ternary(self, path: str) -> tuple[str, float]:
        """A matrix that is ternary in the source: its codes and its scale."""
        source, target, name = self._source, self._target, f"{path}.weight"
        self._done |= {name, f"{path}.scale"}
        weight, exact = source.read_ternary(path)
        scale = exact.astype(self._scale_dtype).astype(mx.float32)
        if path not in target.ternary:
            got = target.read_matrix(path)
            trits = unpack_ternary(weight, source.ternary[path].input_dims)
            self._check_equal(name, got, (trits * scale).astype(got.dtype))
            self._done |= {f"{path}.{key}" for key in KEYS}
        else:
            got, got_scale = target.read_ternary(path)
            self._check_equal(name, got, weight)
            self._check_equal(f"{path}.scale", got_scale, scale)
            self._check_scale_copies(path, scale)
            if target.has_masters(path):
                self._check_equal(name, target.read(name), source.read(name))
        return name, largest_difference(scale, exact)

    def _compare_made(self, path: str) -> tuple[str, float]:
        """A matrix that the conversion put into MLX's affine form."""
        weight = self._source.read_matrix(path)
        dtype = self._target.dtype(f"{path}.scales")
        quantize = self._made[path][2]
        for key, want in zip(KEYS, quantize(weight.astype(dtype)), strict=True):
            name = f"{path}.{key}"
            self._check_equal(name, self._target.read(name), want)
            self._done.add(name)
        return f"{path}.weight", largest_difference(self._target.read_matrix(path), weight)

    def _compare_values(self, path: str) -> tuple[str, float]:
        """A matrix in MLX's affine form whose values were stored in another form in the source."""
        want, got = self._source.read_matrix(path), self._target.read_matrix(path)
        # the zero of a trit has no sign
        self._check_equal(f"{path}.weight", got + 0, want.astype(got.dtype) + 0)
        self._done |= {f"{path}.{key}" for key in KEYS}
        return f"{path}.weight", largest_difference(got, want)

    def _compare_stored(self, name: str) -> tuple[str, float]:
        """A parameter that is stored alike in both, or as floats in the target."""
        path, _, key = name.rpartition(".")
        # the bias of a layer is stored alike, whatever becomes of its matrix
        is_same = key == "bias" or _storage(self._source, path) == _storage(self._target, path)
        want = self._source.read(name) if is_same else self._source.read_matrix(path)
        got = self._target.read(name)
        if path in self._source.ternary_values:
            # the zero of a trit has no sign
            want, got = want + 0, got + 0
        self._check_equal(name, got, want.astype(got.dtype))
        return name, largest_difference(got, want)

    def _check_scale_copies(self, path: str, scale: mx.array) -> None:
        """Refuses scales and biases for mlx-lm that are not the exact scale, rounded once."""
        name = self._target.names.to_disk(path)
        for key, sign in (("scales", 1), ("biases", -1)):
            entry = self._target.checkpoint.tensors.get(f"{name}.{key}")
            if entry is not None:
                array = read_tensor(entry)
                want = mx.broadcast_to((sign * scale).astype(array.dtype), array.shape)
                self._check_equal(f"{path}.{key}", array, want)

    def _check_equal(self, name: str, got: mx.array, want: mx.array) -> None:
        is_equal = (got.dtype, got.shape) == (want.dtype, want.shape) and np.array_equal(
            tensor_bytes(got), tensor_bytes(want)
        )
        if not is_equal:
            raise CheckpointError(
                f"[verify] tensor {self._target.names.to_disk(name)!r} must be what the source gives "
                "but differs. The conversion is thrown away; check the disk, and please report this."
            )


def largest_difference(got: mx.array, want: mx.array) -> float:
    """The largest difference of two numbers at the same place, in float32."""
    return float(mx.max(mx.abs(got.astype(mx.float32) - want.astype(mx.float32))))


def _storage(reader: ParameterReader, path: str) -> str | None:
    matrix = reader.matrices.get(path)
    return None if matrix is None else matrix.storage


def _affine_form(reader: ParameterReader, path: str) -> tuple[int, int] | None:
    """Group size and bits of a module in MLX's affine form; `None` if it is in another form."""
    module = reader.quantized.get(path)
    return None if module is None else (module.group_size, module.bits)
