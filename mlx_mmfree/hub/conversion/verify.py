"""Verifies a written checkpoint, tensor by tensor and by its logits, and reports how it compares."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ...files.tensors import read_tensor, tensor_bytes
from ...layers.matrix import converted
from ...models import architecture_of
from ...ops.ternary import unpack_ternary
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.parameter_reader import ParameterReader
from ..checkpoint.weights import build_skeleton, fill
from ..publish.runtimes import Opening
from .to_folder import FloatFormats, quantized_formats, ternary_formats

_CODE_PARTS = ("weight", "scales", "biases")


@dataclass
class Group:
    """Weights of one kind.

    Attributes:
        tensors: The number of parameters.
        weights: The number of weights.
        source_bytes: Their bytes in the source, including scales.
        target_bytes: Their bytes as written, including scales.
        difference: The largest difference of a weight from the source's; `None` if not compared.
    """

    tensors: int = 0
    weights: int = 0
    source_bytes: int = 0
    target_bytes: int = 0
    difference: float | None = None

    @property
    def bits_per_weight(self) -> float:
        """The bits of a weight as written, including scales."""
        return 8 * self.target_bytes / max(self.weights, 1)


@dataclass
class Report:
    """The written files, and how they compare with the source.

    Attributes:
        groups: The weights by kind.
        is_lossless: Whether no weight differs from the source's and all linears compute alike.
        logits_difference: The largest difference of a logit for a fixed input, divided by the largest
            logit; `None` if not compared.
        openings: Which programs open the result; empty if that was not asked.

    Example:
        >>> from mlx_mmfree import demo
        >>> report = convert(open_checkpoint(demo.path()), "copied")
        >>> report.is_lossless, report.logits_difference
        (True, 0.0)
    """

    groups: dict[str, Group] = field(default_factory=dict)
    is_lossless: bool = True
    logits_difference: float | None = None
    openings: tuple[Opening, ...] = ()

    def metrics(self) -> dict[str, str]:
        """The metrics of the comparison for a model card; empty if there was none."""
        total = self.total
        if total.difference is None or self.logits_difference is None:
            return {}
        return {
            "tensors compared": str(total.tensors),
            "weights": f"{total.weights:,}",
            "bytes of the source": f"{total.source_bytes:,}",
            "bytes written": f"{total.target_bytes:,}",
            "bits a weight": f"{total.bits_per_weight:.3f}",
            "codes of ternary matrices": "equal",
            "largest difference of a weight": f"{total.difference:.3g}",
            "largest difference of a logit, over the largest": f"{self.logits_difference:.3g}",
        }

    @property
    def total(self) -> Group:
        """All weights."""
        groups = self.groups.values()
        differences = [g.difference for g in groups if g.difference is not None]
        return Group(
            sum(g.tensors for g in groups),
            sum(g.weights for g in groups),
            sum(g.source_bytes for g in groups),
            sum(g.target_bytes for g in groups),
            max(differences, default=None),
        )


class Comparison:
    """Two checkpoints, of which one was made of the other.

    Args:
        source: The source.
        target: What was written.
        formats: What became of float weights.
        scale_dtype: The dtype in which the written format holds the scale of a ternary matrix.
    """

    def __init__(
        self,
        source: ParameterReader,
        target: ParameterReader,
        formats: FloatFormats,
        scale_dtype: mx.Dtype,
    ):
        self._source = source
        self._target = target
        self._scale_dtype = scale_dtype
        made = {**ternary_formats(source), **quantized_formats(source, formats)}
        self._made = {
            path: format for path, format in made.items() if format[:2] == _codes_of(target, path)
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
            if _codes_of(self._source, path) != _codes_of(self._target, path):
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
            self._done |= target.parts(path)
        else:
            got, got_scale = target.read_ternary(path)
            self._check_equal(name, got, weight)
            self._check_equal(f"{path}.scale", got_scale, scale)
            self._check_scale_copies(path, scale)
            if target.has_masters(path):
                self._check_equal(name, target.read(name), source.read(name))
        return name, largest_difference(scale, exact)

    def _compare_made(self, path: str) -> tuple[str, float]:
        """A matrix that the conversion put into codes."""
        weight = self._source.read_matrix(path)
        dtype = self._target.dtype(f"{path}.scales")
        quantize = self._made[path][2]
        for key, want in zip(_CODE_PARTS, quantize(weight.astype(dtype)), strict=True):
            name = f"{path}.{key}"
            self._check_equal(name, self._target.read(name), want)
            self._done.add(name)
        return f"{path}.weight", largest_difference(self._target.read_matrix(path), weight)

    def _compare_values(self, path: str) -> tuple[str, float]:
        """A matrix in codes whose values were stored in another format in the source."""
        want, got = self._source.read_matrix(path), self._target.read_matrix(path)
        # the zero of a trit has no sign
        self._check_equal(f"{path}.weight", got + 0, want.astype(got.dtype) + 0)
        self._done |= self._target.parts(path)
        return f"{path}.weight", largest_difference(got, want)

    def _compare_stored(self, name: str) -> tuple[str, float]:
        """A parameter that is stored alike in both, or as floats in the target."""
        path, _, key = name.rpartition(".")
        # the bias of a layer is stored alike, whatever becomes of its matrix
        kinds = (type(reader.matrices.get(path)) for reader in (self._source, self._target))
        is_same = key == "bias" or len({*kinds}) == 1
        want = self._source.read(name) if is_same else self._source.read_matrix(path)
        got = self._target.read(name)
        if path in self._source.ternary_values:
            # the zero of a trit has no sign
            want, got = want + 0, got + 0
        expected, layout = want.astype(got.dtype), self._target.own_layouts.get(name)
        if layout is not None and layout.changes:
            stored = layout.write(want).astype(self._target.dtype(name))
            expected = layout.read(stored).astype(got.dtype)
        self._check_equal(name, got, expected)
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
    """The largest difference of two numbers at the same index, in float32."""
    return float(mx.max(mx.abs(got.astype(mx.float32) - want.astype(mx.float32))))


def _codes_of(reader: ParameterReader, path: str) -> tuple[int, int] | None:
    """Group size and bits of a module in codes; `None` of any other."""
    module = reader.quantized.get(path)
    return None if module is None else (module.group_size, module.bits)


TERNARY, EMBEDDING, REST = "ternary matrices", "embedding and head", "norms and the rest"
LOGITS_TOLERANCE = 1e-5


def take_stock(source: ParameterReader, target: ParameterReader) -> Report:
    """Counts tensors, weights and bytes. Nothing is compared."""
    report = Report({kind: Group() for kind in (TERNARY, EMBEDDING, REST)})
    for name, weights in _logical_sizes(target):
        group = report.groups[kind_of(name, source, target)]
        group.tensors += 1
        group.weights += weights
    for reader, attribute in ((source, "source_bytes"), (target, "target_bytes")):
        locations = set()
        stored = reader.checkpoint.tensors
        newer_name = architecture_of(reader.model.config).newer_name
        for disk_name, entry in stored.items():
            # in GGUF files a matrix and its scale start at the same offset
            location = (entry.file, entry.start)
            if location in locations:
                continue
            locations.add(location)
            newer = disk_name if newer_name is None else newer_name(disk_name, stored)
            whole, _ = reader.names.stack_of(newer) or (newer, 0)
            name = reader.names.to_memory(whole) or disk_name
            group = report.groups[kind_of(name, source, target)]
            setattr(group, attribute, getattr(group, attribute) + entry.nbytes)
    return report


def verify(
    source: ParameterReader,
    target: ParameterReader,
    formats: FloatFormats,
    scale_dtype: mx.Dtype = mx.float32,
) -> Report:
    """Reads both checkpoints and compares every tensor, then the logits of a fixed input.

    The codes and scales of ternary matrices must be equal. Other weights must be what the conversion
    makes of the source's.

    Args:
        source: The source.
        target: What was written.
        formats: What became of float weights.
        scale_dtype: The dtype in which the format holds the scale of a ternary matrix.

    Raises:
        CheckpointError: Something differs.
    """
    report = take_stock(source, target)
    for group in report.groups.values():
        group.difference = 0.0
    for name, difference in Comparison(source, target, formats, scale_dtype).differences():
        group = report.groups[kind_of(name, source, target)]
        group.difference = max(group.difference or 0.0, difference)
    # a ternary linear that became dense computes with float activations
    is_same_kind = set(source.ternary) == set(target.ternary)
    report.is_lossless = report.total.difference == 0.0 and is_same_kind
    report.logits_difference = compare_logits(source, target)
    must_be_equal = report.is_lossless and _compute_alike(source, target)
    if must_be_equal and not report.logits_difference <= LOGITS_TOLERANCE:
        raise CheckpointError(
            f"[verify] the logits must be equal within {LOGITS_TOLERANCE} but differ by "
            f"{report.logits_difference:.3g}. The conversion is thrown away; please report this."
        )
    return report


def kind_of(name: str, source: ParameterReader, target: ParameterReader) -> str:
    """Which group of the report a parameter belongs to, by its name in memory."""
    path = name.rpartition(".")[0]
    has_few_bits = path in source.few_bits or path in target.few_bits
    if path in source.ternary or path in source.ternary_values or has_few_bits:
        return TERNARY
    return EMBEDDING if path in ("embed", "head") else REST


def compare_logits(source: ParameterReader, target: ParameterReader) -> float:
    """The largest difference of a logit for a fixed input, divided by the largest logit."""
    dtype = _compared_in(source, target)
    want, got = (_logits(reader.checkpoint, dtype) for reader in (source, target))
    return largest_difference(got, want) / max(largest_difference(want, mx.zeros(())), 1e-30)


def _compared_in(source: ParameterReader, target: ParameterReader) -> mx.Dtype | None:
    """The dtype in which logits of both are computed; `None`: each parameter's own."""
    # in 16 bits MLX rounds the sum of each group, and the two may have other groups or none
    are_unlike = source.activation_dtype != target.activation_dtype
    return mx.float32 if are_unlike or source.quantized or target.quantized else None


def _compute_alike(source: ParameterReader, target: ParameterReader) -> bool:
    """Returns whether equal weights give equal logits: not if only one of them rounds to 16 bits."""
    if _compared_in(source, target) is not None:
        return True
    one, other = (
        {
            name: reader.checkpoint.dtype or reader.dtype(name)
            for name in reader.shapes
            if name.rpartition(".")[0] not in reader.matrices
        }
        for reader in (source, target)
    )
    return one == other


def _logits(checkpoint: Checkpoint, dtype: mx.Dtype | None) -> mx.array:
    model = fill(build_skeleton(checkpoint, packed=True))
    if dtype := dtype or checkpoint.dtype:
        converted(model, dtype)
    model.eval()
    sample = architecture_of(model.config).sample(model.config)
    logits = model.predictions(sample).astype(mx.float32)
    mx.eval(logits)
    del model
    mx.clear_cache()
    return logits


def _logical_sizes(reader: ParameterReader) -> Iterator[tuple[str, int]]:
    """Yields the parameters with the number of weights in each. Scales of a matrix count as none."""
    for name, shape in reader.shapes.items():
        path, _, key = name.rpartition(".")
        matrix = reader.matrices.get(path)
        if matrix is None or not matrix.is_packed or name not in reader.parts(path):
            yield name, math.prod(shape)
        else:
            yield name, math.prod(reader.matrix_shape(path)) if key == "weight" else 0
