"""Verifies a written checkpoint: its tensors and its logits are those of the source."""

import math
from collections.abc import Iterator

import mlx.core as mx

from ...errors import CheckpointError
from ...layers.matrix import converted
from ...models import architecture_of
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.fill import fill
from ..checkpoint.forms.affine_format import KEYS, TERNARY_BITS
from ..checkpoint.parameter_reader import ParameterReader
from ..checkpoint.skeleton import build_skeleton
from .compare import Comparison, largest_difference
from .plan import FloatForms
from .report import Group, Report

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
        places = set()
        for disk_name, entry in reader.checkpoint.tensors.items():
            # in GGUF files a matrix and its scale have the same place
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
    """Reads both checkpoints and compares every tensor, then the logits of a fixed input.

    The codes and scales of ternary matrices must be equal. Other weights must be what the conversion
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
    for name, difference in Comparison(source, target, forms, scale_dtype).differences():
        group = report.groups[kind_of(name, source, target)]
        group.difference = max(group.difference or 0.0, difference)
    # a ternary linear that became dense computes with float activations
    is_same_kind = set(source.ternary) == set(target.ternary)
    report.is_lossless = report.total.difference == 0.0 and is_same_kind
    report.logits_difference = compare_logits(source, target)
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


def compare_logits(source: ParameterReader, target: ParameterReader) -> float:
    """The largest difference of a logit for a fixed input, divided by the largest logit."""
    readers = (source, target)
    # in 16 bits MLX rounds the sum of each group, and the two may have other groups or none
    dtype = mx.float32 if any(reader.quantized for reader in readers) else None
    want, got = (_logits(reader.checkpoint, dtype) for reader in readers)
    return largest_difference(got, want) / max(largest_difference(want, mx.zeros(())), 1e-30)


def _logits(checkpoint: Checkpoint, dtype: mx.Dtype | None) -> mx.array:
    model = fill(build_skeleton(checkpoint, packed=True))
    model = converted(model, dtype or checkpoint.dtype)
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
        if path in reader.ternary and key in ("weight", "scale"):
            module = reader.ternary[path]
            yield name, module.output_dims * module.input_dims if key == "weight" else 0
        elif (path in reader.quantized and key in KEYS) or path in reader.packed_dense:
            yield name, math.prod(reader.matrix_shape(path)) if key == "weight" else 0
        else:
            yield name, math.prod(shape)
