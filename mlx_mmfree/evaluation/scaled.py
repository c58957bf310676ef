"""How fast a model of a published shape would be, scaled by depth from some of its layers and its head.

Layers of one kind take the same time, so that few of each kind, with random weights, stand for all.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import ceil
from typing import Any

import mlx.core as mx
import numpy as np

from ..layers.matrix import matrices
from ..layers.merged import merge_projections
from ..models import Decoder, check_causal
from ..ops.kernel_times import total_bytes
from ..platform.allocator import keep_freed_memory
from ..platform.resident_memory import peak_resident_bytes
from .audit.skeleton import skeleton
from .benchmark import Record, measure_loaded, nested_arrays

SCALED = "mlx_mmfree.evaluation.scaled:measure_scaled"

COLD_BYTES = 2**26
"""So many bytes of a kind's layers are measured, or all: more than caches hold from token to token."""

_FEW_TOKENS, _DRAWN_ROWS = 256, 512

Term = tuple[float, Record]


def combined(name: str, terms: Sequence[Term]) -> Record:
    """The record of a sum of parts, each so many times, that were measured in the same process.

    A difference that is lost in the noise of the clock counts as a nanosecond.
    """
    first = terms[0][1]

    def of_rounds(key: str) -> list[float]:
        rounds = zip(*(getattr(record, key) for _, record in terms), strict=True)
        times = [count for count, _ in terms]
        sums = (sum(n * s for n, s in zip(times, each, strict=True)) for each in rounds)
        return [max(seconds, 1e-9) for seconds in sums]

    return replace(
        first,
        name=name,
        bytes=round(sum(count * record.bytes for count, record in terms)),
        macs=round(sum(count * record.macs for count, record in terms)),
        seconds=of_rounds("seconds"),
        limit_seconds=of_rounds("limit_seconds"),
    )


def kinds_of_layers(model: Decoder) -> dict[str, list[Any]]:
    """The blocks of each kind: of one description in the configuration and the same parts."""
    types = getattr(model.config, "layer_types", ())
    found: dict[tuple[str, str], list[Any]] = {}
    for n, block in enumerate(model.blocks):
        name = types[n].replace("_", " ") if types else type(block.token_mixer).__name__
        found.setdefault((name, repr(block)), []).append(block)
    names = Counter(name for name, _ in found)
    return {
        name if names[name] == 1 else f"{name} ({n})": blocks
        for n, ((name, _), blocks) in enumerate(found.items(), 1)
    }


def measure_scaled(
    name: str, config: Mapping[str, Any], dtype: str | None = None, **amounts: Any
) -> dict[str, Any]:
    """Measures layers of each kind and the head by themselves, and scales them by depth.

    A layer's time is the time of a model of such layers less the time of one without layers, both with a
    vocabulary of few tokens. The head comes with the lookup, the last norm and sampling.

    Args:
        name: Name to show with the results.
        config: Configuration, as in a `config.json` of the Hub.
        dtype: Dtype of everything that is not packed; `None` takes the configuration's.
        amounts: As for `measure_loaded`.

    Returns:
        The `records` of the parts and of the whole model, and the `memory` of what was measured.
    """
    keep_freed_memory()
    before = peak_resident_bytes()
    floats = getattr(mx, dtype) if dtype else None
    whole = skeleton(config, floats)
    check_causal(whole)
    model = skeleton(_with_vocabulary(config, _FEW_TOKENS), floats)
    kinds, memory = kinds_of_layers(model), []

    def measured(model: Decoder, blocks: list[Any]) -> list[Record]:
        model.blocks = blocks
        draw_weights(model)
        merge_projections(model)
        result = measure_loaded(model, name, before, **amounts)
        memory.append(result["memory"])
        return [Record(**record) for record in result["records"]]

    head, nothing = measured(whole, []), measured(model, [])
    del whole
    parts: dict[str, tuple[float, list[list[Term]]]] = {}
    for kind, blocks in kinds.items():
        some = blocks[: ceil(COLD_BYTES / total_bytes(nested_arrays(blocks[0])))]
        pairs = zip(measured(model, some), nothing, strict=True)
        terms: list[list[Term]] = [[(1, own), (-1, empty)] for own, empty in pairs]
        parts[f"{len(some)} of {len(blocks)} {kind} layers"] = len(blocks) / len(some), terms
    whole_name = f"{name}, scaled from {', '.join(parts)} and the head"
    parts["the head"] = 1, [[(1, record)] for record in head]
    found = []
    for n, record in enumerate(head):
        what, scaled = record.name.rpartition(": ")[2], []
        for part, (times, terms) in parts.items():
            found.append(combined(f"{name}, {part}: {what}", terms[n]))
            scaled += [(times * count, own) for count, own in terms[n]]
        found.append(combined(f"{whole_name}: {what}", scaled))
    return {"records": [asdict(r) for r in found], "memory": {"model": name, "parts": memory}}


def _with_vocabulary(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    """A configuration with another vocabulary, without the tokens that have a role in the old one."""
    others = {key: value for key, value in config.items() if not key.endswith("_token_id")}
    if isinstance(inner := config.get("text_config"), Mapping):
        others["text_config"] = _with_vocabulary(inner, size)
    return others | {"vocab_size": size}


def draw_weights(model: Decoder) -> None:
    """Draws some rows of each matrix in its own format, and repeats them.

    Codes of 2 bits are ternary, and codes of 1 bit are signs, as in the models that have them.
    """
    random = np.random.default_rng(0)
    for matrix in matrices(model).values():
        layer: Any = matrix.layer
        if not matrix.is_shared:
            shape, size = layer.weight.shape, matrix.input_dims**-0.5
            some = (min(shape[0], _DRAWN_ROWS), shape[1])
            rows = random.integers(0, 2**32, some, np.uint32)
            is_ternary = matrix.holds_trits or (matrix.holds_codes and layer.bits == 2)
            if is_ternary:
                # code 3 stands for no trit and becomes code 1, which stands for zero
                rows &= ~((rows & (rows >> 1) & np.uint32(0x55555555)) << 1)
            if matrix.holds_trits:
                layer.scale = mx.full(layer.scale.shape, size)
            elif matrix.holds_codes:
                scales = 2 * size / 2**layer.bits * random.uniform(0.5, 1.5, layer.scales.shape)
                layer.scales = mx.array(scales.astype(np.float16)).astype(layer.scales.dtype)
                middle = 1 if is_ternary else (2**layer.bits - 1) / 2
                layer.biases = -middle * layer.scales
            else:
                rows = random.normal(0, size, some).astype(np.float32)
            weight = mx.array(rows)[mx.arange(shape[0]) % some[0]]
            layer.weight = weight.astype(layer.weight.dtype)
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
