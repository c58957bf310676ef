"""Products of ternary layers and heads with weights in cold memory, beside plain reads of them."""

import math
from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from ..layers import PackedBitLinear, apply_head
from ..platform.allocator import keep_freed_memory
from .benchmark_limits import Limits, held_arrays, limits
from .benchmark_record import MULTIPLY, READ, Record
from .benchmark_rounds import elapsed, in_turn
from .benchmark_weights import random_head, random_packed

# as in a model, a few products are queued together and share the overhead of an evaluation
_GROUP = 8


def run(
    shapes: Sequence[Sequence[int]],
    rows: Sequence[int],
    heads: Sequence[Sequence[int]],
    head_bits: Sequence[int],
    walk_bytes: int,
    rounds: int,
) -> tuple[list[Record], dict]:
    """Measures products, including the quantisation of their input and the start of the threads.

    Args:
        shapes: Output and input dims of ternary matrices.
        rows: Numbers of tokens multiplied at a time. The limit of one token is a plain read, that of
            several is arithmetic.
        heads: Output and input dims of heads.
        head_bits: Bits of the heads' weights; 16 means bfloat16.
        walk_bytes: Smallest number of bytes of all copies of a matrix, so that each copy has left the
            caches when its turn comes.
        rounds: Number of measurements, after one that does not count.
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

    def limit_seconds() -> float:
        if rate is not None:
            return weights * rows / (found.multiply_rate() or rate)
        arrays = [array for layer in layers for array in held_arrays(layer)]
        return found.read_seconds(arrays) / len(layers)

    def call_all() -> None:
        for first in range(0, len(layers), _GROUP):
            mx.eval([call(layer, x) for layer in layers[first : first + _GROUP]])

    own, limit = in_turn(rounds, limit_seconds, lambda: elapsed(call_all) / len(layers))
    return Record(
        name,
        threads=found.threads,
        limit=READ if rate is None else MULTIPLY,
        bytes=sum(array.nbytes for array in held_arrays(layers[0])),
        macs=weights * rows,
        seconds=own,
        limit_seconds=limit,
        unit="rows",
        count=rows,
    )


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
