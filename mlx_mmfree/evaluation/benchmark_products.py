"""Products of ternary layers and of heads from cold memory, in turn with plain reads of it."""

import math
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from ..layers import PackedBitLinear, apply_head
from ..platform.allocator import keep_freed_memory
from .benchmark_limits import Limits, held_arrays, limits
from .benchmark_record import MULTIPLY, READ, Record
from .benchmark_weights import random_head, random_packed

# Products queued at a time: as in a model, MLX's hand-over is shared by a few of them.
_GROUP = 8


def run(
    shapes: Sequence[Sequence[int]],
    rows: Sequence[int],
    heads: Sequence[Sequence[int]],
    head_bits: Sequence[int],
    walk_bytes: int,
    rounds: int,
) -> tuple[list[Record], dict]:
    """Measures products, quantisation of their input and hand-over to the threads included.

    Args:
        shapes: Outputs and inputs of ternary matrices.
        rows: Tokens multiplied at a time: one against a plain read, several against arithmetic.
        heads: Outputs and inputs of heads.
        head_bits: Bits of their weights; 16 means floats.
        walk_bytes: The copies of a matrix take at least this much, so that each is cold when its turn
            comes.
        rounds: How often everything is measured, after a first time.
    """
    keep_freed_memory()
    records = []
    with limits() as found:
        buffer = mx.full((max(walk_bytes // 4, 1),), 1, mx.uint32)
        plain = [found.read_seconds([buffer]) for _ in range(rounds + 1)][1:]
        notes = {
            "bytes_per_second": buffer.nbytes / min(plain),
            "macs_per_second": found.multiply_rate(),
            "read_method": found.read_method(),
        }
        del buffer
        for outputs, inputs in shapes:
            weight = random_packed(outputs, inputs)
            layers: list[nn.Module] = [
                _ternary(outputs, inputs, weight) for _ in range(_copies(weight, walk_bytes))
            ]
            for count in rows:
                name = f"ternary {outputs} x {inputs}, {_rows(count)}"
                records.append(
                    _measure(found, name, layers, _call, count, outputs * inputs, inputs, rounds)
                )
            del layers
        for outputs, inputs in heads:
            for bits in head_bits:
                head = random_head(outputs, inputs, bits)
                copies = _copies(head.weight, walk_bytes)
                layers = [head, *(random_head(outputs, inputs, bits) for _ in range(copies - 1))]
                name = f"head {outputs} x {inputs}, {bits} bits, 1 row"
                records.append(
                    _measure(found, name, layers, apply_head, 1, outputs * inputs, inputs, rounds)
                )
                del head, layers
    return records, notes


def _measure(
    found: Limits,
    name: str,
    layers: Sequence[nn.Module],
    call: Callable[[nn.Module, mx.array], mx.array],
    rows: int,
    weights: int,
    inputs: int,
    rounds: int,
) -> Record:
    x = mx.random.normal((rows, inputs))
    mx.eval(x)
    rate = found.multiply_rate() if rows > 1 else None
    own, limit = [], []
    for n in range(-1, rounds):
        arrays = [array for layer in layers for array in held_arrays(layer)]
        if rate is None:
            plain = found.read_seconds(arrays) / len(layers)
        else:
            plain = weights * rows / (found.multiply_rate() or rate)
        product = _walk(layers, x, call) / len(layers)
        # the first round starts threads, touches pages and lets layers arrange their weights
        if n >= 0:
            own.append(product)
            limit.append(plain)
    size = sum(array.nbytes for array in held_arrays(layers[0]))
    kind = READ if rate is None else MULTIPLY
    return Record(
        name, found.threads, kind, size, weights * rows, tuple(own), tuple(limit), "rows", rows
    )


def _walk(
    layers: Sequence[nn.Module], x: mx.array, call: Callable[[nn.Module, mx.array], mx.array]
) -> float:
    start = time.perf_counter()
    for first in range(0, len(layers), _GROUP):
        mx.eval([call(layer, x) for layer in layers[first : first + _GROUP]])
    return time.perf_counter() - start


def _call(layer: nn.Module, x: mx.array) -> mx.array:
    y: mx.array = layer(x)
    return y


def _ternary(outputs: int, inputs: int, weight: mx.array) -> PackedBitLinear:
    layer = PackedBitLinear(inputs, outputs)
    layer.weight = mx.bitwise_or(weight, mx.array(0, mx.uint32))
    mx.eval(layer.parameters())
    return layer


def _copies(weight: mx.array, walk_bytes: int) -> int:
    return max(2, math.ceil(walk_bytes / weight.nbytes))


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"
