"""Compares a written checkpoint with its source, tensor by tensor and by the logits."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ...files.safetensors_writer import tensor_bytes
from ...files.tensor_entry import TensorEntry, read_tensors
from ...layers.matrix import matrices
from ...layers.parameters import converted
from ...ops.ternary import unpack_ternary
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.fill import fill
from ..checkpoint.forms.affine_format import KEYS, TERNARY_BITS
from ..checkpoint.parameter_reader import ParameterReader
from ..checkpoint.skeleton import build_skeleton
from ..publish.runtimes import Opening
from .plan import FloatForms
from .to_mlx import quantized_forms, ternary_forms

TERNARY, EMBEDDING, REST = "ternary matrices", "embedding and head", "norms and the rest"
LOGITS_TOLERANCE = 1e-5
_TOKENS = 24


@dataclass
class Group:
    """Weights of one kind.

    Attributes:
        tensors: Number of parameters.
        weights: Number of weights.
        source_bytes: Their bytes in the source, scales included.
        target_bytes: The same as written.
        difference: The largest difference of a weight from the source's; `None` if not compared.
    """

    tensors: int = 0
    weights: int = 0
    source_bytes: int = 0
    target_bytes: int = 0
    difference: float | None = None

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight as written, scales included."""
        return 8 * self.target_bytes / max(self.weights, 1)


@dataclass
class Report:
    """What was written, and how it compares with the source.

    Attributes:
        groups: The weights by kind.
        is_lossless: Whether no weight should differ from the source's.
        logits_difference: The largest difference of a logit for a fixed sequence, over the largest
            logit; `None` if not compared.
        openings: Which programs open the result; empty if not asked.
    """

    groups: dict[str, Group] = field(default_factory=dict)
    is_lossless: bool = True
    logits_difference: float | None = None
    openings: tuple[Opening, ...] = ()

    def figures(self) -> dict[str, str]:
        """What a model card says of the comparison; empty if there was none."""
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


def take_stock(source: ParameterReader, target: ParameterReader) -> Report:
    """Counts tensors, weights and bytes; nothing is compared."""
    report = Report({kind: Group() for kind in (TERNARY, EMBEDDING, REST)})
    for name, weights in _logical_sizes(target):
        group = report.groups[kind_of(name, source, target)]
        group.tensors += 1
        group.weights += weights
    for reader, attribute in ((source, "source_bytes"), (target, "target_bytes")):
        places = set()
        for disk_name, entry in reader.checkpoint.tensors.items():
            # in GGUF files a matrix and its scale lie in one place
            place = (entry.file, entry.start)
            if place in places:
                continue
            places.add(place)
            name = reader.names.to_memory(disk_name) or disk_name
            group = report.groups[kind_of(name, source, target)]
            setattr(group, attribute, getattr(group, attribute) + entry.nbytes)
    return report


def verify(
    source: ParameterReader,
    target: ParameterReader,
    forms: FloatForms,
    scale_dtype: mx.Dtype = mx.float32,
) -> Report:
    """Reads both again and compares every tensor, then the logits of a fixed sequence.

    Codes and scales of ternary matrices must be equal, other weights must be what the conversion
    makes of the source's.

    Args:
        source: The source.
        target: What was written.
        forms: What became of float weights.
        scale_dtype: The dtype in which the form holds the scale of a ternary matrix.

    Raises:
        CheckpointError: Something differs.
    """
    report = take_stock(source, target)
    for group in report.groups.values():
        group.difference = 0.0
    for name, difference in _differences(source, target, forms, scale_dtype):
        group = report.groups[kind_of(name, source, target)]
        group.difference = max(group.difference or 0.0, difference)
    # a dense linear computes with float activations
    is_same_kind = set(source.ternary) == set(target.ternary)
    report.is_lossless = report.total.difference == 0.0 and is_same_kind
    report.logits_difference = compare_logits(source.checkpoint, target.checkpoint)
    if report.is_lossless and not report.logits_difference <= LOGITS_TOLERANCE:
        raise CheckpointError(
            f"[verify] the logits must be equal within {LOGITS_TOLERANCE} but differ by "
            f"{report.logits_difference:.3g}. The conversion is thrown away; please report this."
        )
    return report


def kind_of(name: str, source: ParameterReader, target: ParameterReader) -> str:
    """Which group of the report a parameter belongs to, by its name in memory."""
    path = name.rpartition(".")[0]
    quantized = (reader.quantized.get(path) for reader in (source, target))
    has_two_bits = any(module is not None and module.bits == TERNARY_BITS for module in quantized)
    if path in source.ternary or path in source.ternary_values or has_two_bits:
        return TERNARY
    return EMBEDDING if path in ("embed", "head") else REST


def compare_logits(source: Checkpoint, target: Checkpoint) -> float:
    """The largest difference of a logit for a fixed sequence, over the largest logit."""
    want, got = (_logits(checkpoint) for checkpoint in (source, target))
    return _distance(got, want) / max(_distance(want, mx.zeros(())), 1e-30)


def _logits(checkpoint: Checkpoint) -> mx.array:
    model, dtype = fill(build_skeleton(checkpoint, packed=True)), checkpoint.dtype
    if any(matrix.storage == "codes" for matrix in matrices(model).values()):
        # in 16 bits MLX rounds the sums of groups, and groups may differ
        dtype = mx.float32
    model = converted(model, dtype)
    tokens = mx.array([[(7 + 7919 * n) % model.vocab_size for n in range(_TOKENS)]], mx.int32)
    logits = model.predictions(tokens).astype(mx.float32)
    mx.eval(logits)
    del model
    mx.clear_cache()
    return logits


def _logical_sizes(reader: ParameterReader) -> Iterator[tuple[str, int]]:
    """Parameters, and how many weights each stands for; scales of a matrix stand for none."""
    for name, shape in reader.shapes.items():
        path, _, key = name.rpartition(".")
        if path in reader.ternary and key in ("weight", "scale"):
            module = reader.ternary[path]
            yield name, module.output_dims * module.input_dims if key == "weight" else 0
        elif (path in reader.quantized and key in KEYS) or path in reader.packed_dense:
            yield name, math.prod(reader.matrix_shape(path)) if key == "weight" else 0
        else:
            yield name, math.prod(shape)


def _differences(
    source: ParameterReader,
    target: ParameterReader,
    forms: FloatForms,
    scale_dtype: mx.Dtype,
) -> Iterator[tuple[str, float]]:
    made = {**ternary_forms(source), **quantized_forms(source, forms)}
    made = {path: made[path] for path in made if made[path][:2] == _affine_form(target, path)}
    done: set[str] = set()
    for path in source.ternary:
        done |= {f"{path}.weight", f"{path}.scale"}
        weight, exact = source.read_ternary(path)
        scale = exact.astype(scale_dtype).astype(mx.float32)
        yield f"{path}.weight", _distance(scale, exact)
        if path not in target.ternary:
            got = target.read_matrix(path)
            trits = unpack_ternary(weight, source.ternary[path].input_dims)
            _check_equal(target, f"{path}.weight", got, (trits * scale).astype(got.dtype))
            done |= {f"{path}.{key}" for key in KEYS}
            continue
        for key, want, got in zip(
            ("weight", "scale"), (weight, scale), target.read_ternary(path), strict=True
        ):
            _check_equal(target, f"{path}.{key}", got, want)
        _check_scale_copies(target, path, scale)
        if target.has_masters(path):
            master = f"{path}.weight"
            _check_equal(target, master, target.read(master), source.read(master))
    for path, (_, _, quantize) in made.items():
        weight = source.read_matrix(path)
        dtype = target.dtype(f"{path}.scales")
        for key, want in zip(KEYS, quantize(weight.astype(dtype)), strict=True):
            _check_equal(target, f"{path}.{key}", target.read(f"{path}.{key}"), want)
            done.add(f"{path}.{key}")
        yield f"{path}.weight", _distance(target.read_matrix(path), weight)
    for path in target.quantized:
        if path in made or f"{path}.weight" in done:
            continue
        if _affine_form(source, path) != _affine_form(target, path):
            want, got = source.read_matrix(path), target.read_matrix(path)
            # a trit's zero has no sign
            _check_equal(target, f"{path}.weight", got + 0, want.astype(got.dtype) + 0)
            yield f"{path}.weight", _distance(got, want)
            done |= {f"{path}.{key}" for key in KEYS}
    for name in target.shapes:
        path = name.rpartition(".")[0]
        if name not in done:
            is_same = _storage(source, path) == _storage(target, path)
            want = source.read(name) if is_same else source.read_matrix(path)
            got = target.read(name)
            if path in source.ternary_values:
                # a trit's zero has no sign
                want, got = want + 0, got + 0
            _check_equal(target, name, got, want.astype(got.dtype))
            yield name, _distance(got, want)
        mx.clear_cache()


def _storage(reader: ParameterReader, path: str) -> str | None:
    matrix = reader.matrices.get(path)
    return None if matrix is None else matrix.storage


def _affine_form(reader: ParameterReader, path: str) -> tuple[int, int] | None:
    """Group size and bits of a module in MLX's affine form; `None` if it is not."""
    module = reader.quantized.get(path)
    return None if module is None else (module.group_size, module.bits)


def _check_scale_copies(target: ParameterReader, path: str, scale: mx.array) -> None:
    """What mlx-lm reads must be the exact scale, rounded once."""
    name = target.names.to_disk(path)
    for key, sign in (("scales", 1), ("biases", -1)):
        entry: TensorEntry | None = target.checkpoint.tensors.get(f"{name}.{key}")
        if entry is not None:
            [(_, array)] = read_tensors(entry.file, [entry])
            want = mx.broadcast_to((sign * scale).astype(array.dtype), array.shape)
            _check_equal(target, f"{path}.{key}", array, want)


def _check_equal(target: ParameterReader, name: str, got: mx.array, want: mx.array) -> None:
    is_equal = (got.dtype, got.shape) == (want.dtype, want.shape) and np.array_equal(
        tensor_bytes(got), tensor_bytes(want)
    )
    if not is_equal:
        raise CheckpointError(
            f"[verify] tensor {target.names.to_disk(name)!r} must be what the source gives but "
            "differs. The conversion is thrown away; check the disk, and please report this."
        )


def _distance(got: mx.array, want: mx.array) -> float:
    return float(mx.max(mx.abs(got.astype(mx.float32) - want.astype(mx.float32))))
